"""softmax(q k^T / 8) v and its log-sum-exp, one batch, one head, in the form that the verifier can compare.

Run alone: nothing is imported at its top. No maximum is subtracted, as over the reals it cancels; the exponential has
the kernel's own float32 constant, 12102203 / 2^26 = float32(log2(e) / 8); results have the buffers' dtypes.
`ints` is named because both sides must know the same inputs; the lengths in it are the full ones.
"""


def reference(q, k, v, ints):
    b, t, n, d = q.shape
    s = q.reshape(t, d).float() @ k.reshape(k.shape[1], d).float().t()
    p = (s * (12102203 / 67108864)).exp2()
    total = p.sum(1, keepdim=True)
    out = (p @ v.reshape(v.shape[1], d).float()) / total
    return out.to(q.dtype).reshape(b, t, n, d), total.log().reshape(b, n, t)
