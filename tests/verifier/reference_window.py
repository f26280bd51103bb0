"""Attention of each query to the keys at and after it, and its log-sum-exp: see `reference_attention.py`.

Every number of the operand of run-time values is 128, as a premise of the proof can only be about all of its elements:
no length below 128 keys, an offset of 128, windows of 128 to both sides, so query i sees the keys from i on.
"""


def reference(q, k, v, ints):
    import torch

    b, t, n, d = q.shape
    s = q.reshape(t, d).float() @ k.reshape(k.shape[1], d).float().t()
    at = torch.arange(t, device=q.device)[:, None]
    seen = torch.arange(k.shape[1], device=q.device)[None, :] >= at
    p = (s * (12102203 / 67108864)).exp2()
    p = torch.where(seen, p, torch.zeros_like(p))
    total = p.sum(1, keepdim=True)
    out = (p @ v.reshape(v.shape[1], d).float()) / total
    return out.to(q.dtype).reshape(b, t, n, d), total.log().reshape(b, n, t)
