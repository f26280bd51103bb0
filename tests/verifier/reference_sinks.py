"""Attention whose weights share their sum with a sink's, a logit that has no value. See `reference_attention.py`.

Run alone: nothing is imported at its top. All keys are seen; `first`, `last` and `keys` say so. log2(e) is the float32.
"""


def reference(q, k, v, sinks, first, last, keys):
    _, t, n, d = q.shape
    assert n == k.shape[2] == 1 and first <= 0 and last >= keys == k.shape[1], "one head, all keys"
    p = ((q.reshape(t, d).float() @ k.reshape(keys, d).float().t()) * (12102203 / 67108864)).exp2()
    total = p.sum(1, keepdim=True) + (sinks.reshape(1, 1) * (12102203 / 8388608)).exp2()
    return (((p @ v.reshape(keys, d).float()) / total).to(q.dtype).reshape(1, t, n, d),)
