"""dK and dV of attention, one batch, one head, as the backward's main kernel computes them from `stats`.

Run alone: nothing is imported at its top. `stats` holds, for each tile of 128 queries, their log-sum-exp in base 2 and
then their delta = rowsum(dO O) - dLSE. The scale is the call's own, a value in memory; log2(e) is the kernel's float32.
"""


def reference(q, k, v, dout, stats, ints, floats):
    t, s, kind = q.shape[1], k.shape[1], q.dtype
    q, k = q.reshape(t, q.shape[3]).float(), k.reshape(s, k.shape[3]).float()
    v, dout = v.reshape(s, v.shape[3]).float(), dout.reshape(t, v.shape[3]).float()
    lse, delta = (stats.reshape(t // 128, 2, 128)[:, i].reshape(t) for i in range(2))
    scale = floats[0]
    p = ((k @ q.t()) * (scale * 1.44269502162933349609375) - lse[None, :]).exp2()
    ds = p * (v @ dout.t() - delta[None, :])
    dk, dv = (ds @ q) * scale, p @ dout
    return dk.to(kind).reshape(1, s, 1, q.shape[1]), dv.to(kind).reshape(1, s, 1, v.shape[1])
