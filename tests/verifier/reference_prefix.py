"""Attention of each query to all keys up to one, and its log-sum-exp. See `reference_attention.py`.

Run alone: nothing is imported at its top. Query i sees the keys from 0 to i + `last` that are below `keys`; `first`,
where a window would begin, is before them all. What is hidden has weight 0: the prover takes a sum of such for the sum
of those before, and compares it with the kernel's.
"""


def reference(q, k, v, first, last, keys):
    import torch

    b, t, n, d = q.shape
    assert n == k.shape[2] == 1 and first <= 0, "heads and windows: reference_rows.py"
    s = q.reshape(t, d).float() @ k.reshape(k.shape[1], d).float().t()
    at = torch.arange(t, device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)[None, :]
    p = (s * (12102203 / 67108864)).exp2()
    p = torch.where(
        (key <= at + last) & (key < keys) if keys < k.shape[1] else key <= at + last, p, torch.zeros_like(p)
    )
    total = p.sum(1, keepdim=True)
    out = (p @ v.reshape(v.shape[1], d).float()) / total
    return out.to(q.dtype).reshape(b, t, n, d), total.log().reshape(b, n, t)
