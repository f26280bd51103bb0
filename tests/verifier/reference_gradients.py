"""dK and dV of attention, one batch, one head, as the backward's main kernel computes them from `stats`.

Run alone: nothing is imported at its top. `stats` holds, for each tile of 128 queries, their log-sum-exp in base 2 and
then their delta = rowsum(dO O) - dLSE. The scale is the call's own, a value in memory; log2(e) is the kernel's float32.
"""


def reference(q, k, v, dout, stats, ints, floats):
    b, t, n, d = q.shape
    s, dv, kind = k.shape[1], v.shape[3], q.dtype
    q, k = q.reshape(t, d).float(), k.reshape(s, d).float()
    v, dout = v.reshape(s, dv).float(), dout.reshape(t, dv).float()
    lse, delta = (stats.reshape(t // 128, 2, 128)[:, i].reshape(t) for i in range(2))
    scale = floats[0]
    p = ((k @ q.t()) * (scale * 1.44269502162933349609375) - lse[None, :]).exp2()
    ds = p * (v @ dout.t() - delta[None, :])
    dk, dv = (ds @ q) * scale, p @ dout
    return dk.to(kind).reshape(b, s, 1, d), dv.to(kind).reshape(b, s, 1, dv.shape[1])
