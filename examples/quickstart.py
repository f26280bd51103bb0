"""Ten lines of use: call, jit, gradient, causal, grouped heads, window, lengths, log-sum-exp. Runs anywhere."""

import jax
import jax.numpy as jnp

import jax_fa4

keys = jax.random.split(jax.random.key(0), 3)
q = jax.random.normal(keys[0], (2, 256, 8, 64), jnp.bfloat16)  # [b, t, n, d]: 8 query heads ...
k = jax.random.normal(keys[1], (2, 256, 2, 64), jnp.bfloat16)  # [b, s, k, d]: ... share 2 key heads, 4 each
v = jax.random.normal(keys[2], (2, 256, 2, 64), jnp.bfloat16)
print("runs on:", jax_fa4.implementation_used(q, k, v, is_causal=True))

out = jax_fa4.attention(q, k, v, is_causal=True)  # the arguments of jax.nn.dot_product_attention
print("causal:", out.shape, out.dtype)

attention = jax.jit(jax_fa4.attention, static_argnames=("is_causal", "local_window_size", "return_residual"))
print("jit:", bool(jnp.allclose(attention(q, k, v, is_causal=True), out, atol=2e-2)))

dq, dk, dv = jax.grad(lambda *x: attention(*x, is_causal=True).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)
print("gradients:", dq.shape, dk.shape, dv.shape)

window = attention(q, k, v, is_causal=True, local_window_size=(64, 0))  # the key itself and 64 before it
lengths = jnp.array([256, 100], jnp.int32)  # keys at 100 and after are padding in the second example
padded, lse = attention(q, k, v, query_seq_lengths=lengths, key_value_seq_lengths=lengths, return_residual=True)
alone = attention(q[1:, :100], k[1:, :100], v[1:, :100])
print("window:", window.shape)
print("lengths: as the short example alone:", bool(jnp.allclose(padded[1:, :100], alone, atol=2e-2)), end=", ")
print("largest value past its end:", float(jnp.abs(padded[1, 100:]).max()))
print("log-sum-exp:", lse.shape, lse.dtype)  # [b, t, n], natural log, differentiable
