"""Attention of each query to a run of keys, and its log-sum-exp; heads that share keys. See `reference_attention.py`.

Run alone: nothing is imported at its top. Query i sees the keys from i + `first` up to i + `last`, both included, that
there are: keys 0 to `keys` - 1. The numbers are the case's own, from its mask; hidden keys are in no sum.
"""


def reference(q, k, v, first, last, keys):
    import torch

    _, queries, heads, depth = q.shape
    group = heads // k.shape[2]
    outs, totals = {}, {}
    for i in range(queries):
        begin, end = max(i + first, 0), min(i + last + 1, keys)
        for h in range(heads):
            row, seen = q[0, i : i + 1, h].float(), k[0, begin:end, h // group].float()
            p = ((row @ seen.t()) * (12102203 / 67108864)).exp2()
            totals[h, i] = p.sum(1, keepdim=True)
            outs[i, h] = (p @ v[0, begin:end, h // group].float()) / totals[h, i]
    out = torch.cat([outs[x] for x in sorted(outs)], 0) if len(outs) > 1 else outs[0, 0]
    total = torch.cat([totals[x] for x in sorted(totals)], 0) if len(totals) > 1 else totals[0, 0]
    return out.to(q.dtype).reshape(1, queries, heads, depth), total.log().reshape(1, heads, queries)
