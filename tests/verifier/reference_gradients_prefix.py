"""dK and dV as in `reference_gradients.py`, of heads that share keys, key j seen by the queries 0 to j + `last`.

Run alone: nothing is imported at its top. A hidden weight is 0 in every sum. The scale is the case's.
"""


def reference(q, k, v, dout, stats, last, scale):
    import torch

    t, heads, s, kind = q.shape[1], q.shape[2], k.shape[1], q.dtype
    k, v = k.reshape(s, k.shape[3]).float(), v.reshape(s, v.shape[3]).float()
    stats = stats.reshape(heads, t // 128, 2, 128)
    dk, dv = [], []
    for h in range(heads):
        qs, do = q[0, :, h].float(), dout[0, :, h].float()
        lse, delta = stats[h, :, 0].reshape(t), stats[h, :, 1].reshape(t)
        p = ((k @ qs.t()) * (scale * 1.44269502162933349609375) - lse[None, :]).exp2()
        if last < t:
            seen = torch.arange(t, device=q.device)[None, :] <= torch.arange(s, device=q.device)[:, None] + last
            p = torch.where(seen, p, torch.zeros_like(p))
        ds = p * (v @ do.t() - delta[None, :])
        dk.append((ds @ qs) * scale)
        dv.append(p @ do)
    dk, dv = (x[0] if heads == 1 else x[0] + x[1] for x in (dk, dv))
    return dk.to(kind).reshape(1, s, 1, k.shape[1]), dv.to(kind).reshape(1, s, 1, v.shape[1])
