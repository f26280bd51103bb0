"""Attention of each query to all keys up to one, and its log-sum-exp, of heads that share their keys. See
`reference_attention.py`.

Run alone: nothing is imported at its top. Query i sees the keys from 0 to i + `last` that are below `keys`; `first`,
where a window would begin, is before them all. What is hidden has weight 0: the prover takes a sum of such for the sum
of those before, and compares it with the kernel's.
"""


def reference(q, k, v, first, last, keys):
    import torch

    _, t, n, d = q.shape
    assert k.shape[2] == 1 and first <= 0, "more key heads, and windows: reference_rows.py"
    p = ((q.reshape(t * n, d).float() @ k.reshape(k.shape[1], d).float().t()) * (12102203 / 67108864)).exp2()
    key = torch.arange(k.shape[1], device=q.device)[None, :]
    if keys < k.shape[1]:
        p = torch.where(key < keys, p, torch.zeros_like(p))
    if last < k.shape[1]:
        assert n == 1, "rows that are heads of a query: the prover does not divide by their number"
        p = torch.where(key <= torch.arange(t, device=q.device)[:, None] + last, p, torch.zeros_like(p))
    total = p.sum(1, keepdim=True)
    out = (p @ v.reshape(v.shape[1], d).float()) / total
    return out.to(q.dtype).reshape(1, t, n, d), total.log().reshape(1, t, n).transpose(1, 2)
