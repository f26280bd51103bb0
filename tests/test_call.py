"""The ffi_call as lowered for CUDA on a machine without it: object, layouts, operands, types; the value operands."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_fa4.ffi import call, runtime, store
from jax_fa4.ffi.artifact import Artifact
from jax_fa4.ffi.buffers import FLOATS_BUFFER, INTS, VALUES, Buffer, value_extents
from jax_fa4.mask import UNBOUNDED


@dataclasses.dataclass(frozen=True)
class Toy:
    """A plan as `call` reads it: two operands of data, a result, a scratch with an extent that the plan derives."""

    depth: int = 64
    arch: str = "sm_90a"

    @property
    def inputs(self):
        q = Buffer("q", "bfloat16", ("B", "T", self.depth))
        return (q, q._replace(name="k", shape=("B", "S", self.depth)), INTS, FLOATS_BUFFER)

    @property
    def outputs(self):
        out = Buffer("out", "bfloat16", ("B", "T", self.depth), "out")
        return (out, Buffer("work", "float32", ("B", "R"), "scratch"), Buffer("lse", "float32", ("B", "T"), "out"))

    def extents(self, shapes):
        return shapes | value_extents(shapes["B"]) | {"R": 2 * shapes["T"]}


OBJECT = b'\x7fELF\x00"quoted"\\\xff' + bytes(range(256))
ARTIFACT = Artifact(repr(Toy()), "sm_90a", "x86-64-v2", OBJECT)


def toy(q, k, kv_len=None, artifact=ARTIFACT):
    (b, t, _), s = q.shape, k.shape[1]
    kv_len = jnp.full((b,), s, jnp.int32) if kv_len is None else kv_len
    ints, floats = call.value_operands((None, 0), t, kv_len, 0, 0.125)
    return call.call(Toy(), artifact, {"floats": floats, "k": k, "q": q, "ints": ints}, {"B": b, "T": t, "S": s})


def shaped(*shape, dtype=jnp.bfloat16, **how):
    return jax.ShapeDtypeStruct(shape, dtype, **how)


def lowered(fn, *args) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def custom_call(text: str) -> str:
    (line,) = [x for x in text.split("\n") if "custom_call @" + runtime.TARGET in x]
    return line


def mlir_bytes(line: str, name: str) -> bytes:
    """The bytes of a string attribute: MLIR writes \\XX for what is not printable, a backslash twice."""
    raw = re.search(rf'{name} = "((?:[^"\\]|\\.)*)"', line).group(1).encode("latin-1")
    return re.sub(rb"\\([0-9A-F]{2}|\\)", lambda m: b"\\" if m[1] == b"\\" else bytes.fromhex(m[1].decode()), raw)


# ---- lowering --------------------------------------------------------------------------------------------------------


def test_the_object_travels_in_the_module():
    line = custom_call(lowered(toy, shaped(2, 8, 64), shaped(2, 16, 64)))
    assert mlir_bytes(line, "module") == OBJECT
    assert mlir_bytes(line, "key") == ARTIFACT.digest


def test_layouts_are_pinned_row_major_and_operands_in_the_plans_order():
    line = custom_call(lowered(toy, shaped(2, 8, 64), shaped(2, 16, 64)))
    operands = re.search(r"operand_layouts = \[(.*?)\], result_layouts", line).group(1)
    results = re.search(r"result_layouts = \[(.*?)\]}", line).group(1)
    assert re.findall(r"dense<(.*?)> :", operands) == ["[2, 1, 0]", "[2, 1, 0]", "0", "0"]
    assert re.findall(r"dense<(.*?)> :", results) == ["[2, 1, 0]", "[1, 0]", "[1, 0]"]
    types = re.search(r" : \((.*?)\) -> \((.*?)\)", line)
    assert types[1] == "tensor<2x8x64xbf16>, tensor<2x16x64xbf16>, tensor<8xi32>, tensor<2xf32>"
    assert types[2] == "tensor<2x8x64xbf16>, tensor<2x16xf32>, tensor<2x8xf32>"


def test_a_transposed_operand_is_made_row_major_before_the_call():
    """The layout is the call's own: a transpose in front stays an operation of the module, whatever XLA makes of it."""
    text = lowered(lambda q, k: toy(q.transpose(2, 0, 1), k)["out"], shaped(8, 64, 2), shaped(2, 16, 64))
    assert "stablehlo.transpose" in text and "[2, 1, 0]" in custom_call(text)


def test_no_operand_is_aliased_and_no_side_effect_is_claimed():
    line = custom_call(lowered(toy, shaped(2, 8, 64), shaped(2, 16, 64)))
    assert "output_operand_alias" not in line and "has_side_effect = true" not in line


def test_scratch_is_dropped():
    made = jax.eval_shape(toy, shaped(2, 8, 64), shaped(2, 16, 64))
    assert {n: (x.shape, x.dtype.name) for n, x in made.items()} == {
        "out": ((2, 8, 64), "bfloat16"),
        "lse": ((2, 8), "float32"),
    }


def test_scratch_is_given_where_asked_for():
    operands = {b.name: shaped(*b.sized({"B": 2, "T": 8, "S": 8, "I": 8}), dtype=b.dtype) for b in Toy().inputs}
    shapes = {"B": 2, "T": 8, "S": 8}
    made = jax.eval_shape(lambda ops: call.call(Toy(), ARTIFACT, ops, shapes, scratch=True), operands)
    assert {n: x.shape for n, x in made.items()} == {"out": (2, 8, 64), "work": (2, 16), "lse": (2, 8)}


def test_lowering_needs_no_runtime_library(monkeypatch):
    def missing():
        raise runtime.RuntimeMissing("not here")

    monkeypatch.setattr(runtime, "_registered", {})
    monkeypatch.setattr(runtime, "find", missing)
    assert runtime.TARGET in lowered(toy, shaped(1, 8, 64), shaped(1, 8, 64))
    monkeypatch.setattr(runtime, "cuda_here", lambda: True)
    with pytest.raises(runtime.RuntimeMissing, match="not here"):
        lowered(lambda q, k: toy(q, k)["lse"], shaped(1, 8, 64), shaped(1, 8, 64))


def test_static_values_are_constants_of_the_module():
    def fixed(q, k):
        ints, floats = call.value_operands((3, 0), np.array([8]), 16, 8, 0.5, 30.0)
        shapes = {"B": 1, "T": 8, "S": 16}
        return call.call(Toy(), ARTIFACT, {"q": q, "k": k, "ints": ints, "floats": floats}, shapes)["out"]

    text = lowered(fixed, shaped(1, 8, 64), shaped(1, 16, 64))
    assert "dense<[3, 0, 8, 16, 8]> : tensor<5xi32>" in text
    assert len(re.findall(r"stablehlo\.(?!constant)\w+", text)) == 1, text  # nothing but the call is computed


# ---- what is wrong is our bug, with the numbers ----------------------------------------------------------------------


def with_operands(**changed):
    operands = {
        "q": jnp.zeros((2, 8, 64), jnp.bfloat16),
        "k": jnp.zeros((2, 16, 64), jnp.bfloat16),
        "ints": jnp.zeros((8,), jnp.int32),
        "floats": jnp.zeros((2,), jnp.float32),
    }
    operands |= changed
    operands = {name: x for name, x in operands.items() if x is not None}
    return lambda: call.call(Toy(), ARTIFACT, operands, {"B": 2, "T": 8, "S": 16})


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"q": jnp.zeros((2, 8, 64), jnp.float16)}, "operand q must be bfloat16; it is float16"),
        ({"q": jnp.zeros((2, 9, 64), jnp.bfloat16)}, r"operand q must have shape \(2, 8, 64\).*it has \(2, 9, 64\)"),
        ({"k": jnp.zeros((2, 16, 128), jnp.bfloat16)}, r"operand k .*it has \(2, 16, 128\)"),
        ({"ints": jnp.zeros((5,), jnp.int32)}, r"operand ints must have shape \(8,\) .*it has \(5,\)"),
        ({"floats": jnp.zeros((2,), jnp.int32)}, "operand floats must be float32; it is int32"),
        ({"k": None}, r"takes the operands \['q', 'k', 'ints', 'floats'\]; it was given \['floats', 'ints', 'q'\]"),
        ({"sinks": jnp.zeros(3)}, "it was given .*sinks"),
    ],
)
def test_wrong_operands(changed, text):
    with pytest.raises(AssertionError, match=text):
        jax.eval_shape(with_operands(**changed))


def test_right_operands_pass():
    """The negatives above fail for what they change."""
    assert jax.eval_shape(with_operands())["out"].shape == (2, 8, 64)


@pytest.mark.parametrize("t", [2**31, -1])
def test_extents_must_fit_int32(t):
    with pytest.raises(AssertionError, match=f"is {t}|is {2 * t}"):
        call.call(Toy(), ARTIFACT, {}, {"B": 1, "T": t, "S": 1})


# ---- sharding and export ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """Constants vary over no axis, operands over some: all are made alike, and the results vary with them."""
    mesh = jax.make_mesh((1, 1), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    specs = {"in_specs": (P("data"), P("data", "heads")), "out_specs": P("data", "heads"), "check_vma": check_vma}
    seen = {}

    def inner(q, k):
        made = toy(q, k)
        seen.update({n: jax.typeof(x).manual_axis_type.varying for n, x in made.items()})
        return made["out"]

    text = lowered(jax.shard_map(inner, mesh=mesh, **specs), shaped(2, 8, 64), shaped(2, 16, 64))
    assert runtime.TARGET in text
    axes = {"data", "heads"} if check_vma else set()
    assert seen == {"out": axes, "lse": axes}


def test_one_export_with_symbolic_shapes():
    b, t, s = jax.export.symbolic_shape("b, t, s")
    args = shaped(b, t, 64), shaped(b, s, 64)

    def exported(**how):
        return jax.export.export(jax.jit(lambda q, k: toy(q, k)["out"]), platforms=["cuda"], **how)(*args)

    with pytest.raises(ValueError, match=runtime.TARGET):
        exported()
    made = exported(disabled_checks=call.disabled_checks())
    assert str(made.out_avals[0].shape) == "(b, t, 64)"
    assert mlir_bytes(custom_call(made.mlir_module()), "module") == OBJECT


# ---- the value operands ----------------------------------------------------------------------------------------------


def read(ints, floats, batch):
    """The values as a kernel reads them."""
    ints, floats, at = np.asarray(ints), np.asarray(floats), VALUES.example(batch)
    assert ints.dtype == np.int32 and floats.dtype == np.float32 and floats.shape == (2,)
    return {
        "left": ints[VALUES.left],
        "right": ints[VALUES.right],
        "q_len": ints[at + VALUES.q_len],
        "kv_len": ints[at + VALUES.kv_len],
        "offset": ints[at + VALUES.offset],
        "scale": floats[VALUES.scale],
        "soft_cap": floats[VALUES.soft_cap],
    }


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_values_stand_where_kernels_read_them(traced):
    def make(q_len, kv_len, offset, left, scale):
        return call.value_operands((left, 5), q_len, kv_len, offset, scale, 30.0)

    args = np.array([3, 4, 5]), np.array([6, 7, 8]), np.array([-1, 0, 2]), 9, 0.25
    ints, floats = jax.jit(make)(*args) if traced else make(*args)
    assert isinstance(ints, jax.Array if traced else np.ndarray)
    assert ints.shape == (2 + 3 * 3,)
    for n in range(3):
        wanted = {"left": 9, "right": 5, "scale": 0.25, "soft_cap": 30.0}
        wanted |= {"q_len": args[0][n], "kv_len": args[1][n], "offset": args[2][n]}
        assert read(ints, floats, n) == wanted


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
def test_defaults_and_broadcasting(traced):
    def make(kv_len):
        return call.value_operands((None, 0), 8, kv_len, 0, 1.5)

    made = (jax.jit(make) if traced else make)(np.array([4, 6]))
    wanted = {"left": UNBOUNDED, "right": 0, "q_len": 8, "offset": 0, "scale": 1.5, "soft_cap": 0.0}
    assert read(*made, 1) == wanted | {"kv_len": 6}


def test_a_window_past_int32_is_unbounded_not_wrapped():
    lengths = np.array([2**40], np.int64)
    ints, _ = call.value_operands((2**35, 2**31), lengths, lengths, 0, 1.0)
    assert list(ints) == [UNBOUNDED, UNBOUNDED, UNBOUNDED, UNBOUNDED, 0]


def test_value_operands_refuse_what_they_cannot_mean():
    one = np.array([1])
    with pytest.raises(AssertionError, match=r"kv_len must have shape \[B\]; it has \(1, 1\)"):
        call.value_operands((None, None), one, np.ones((1, 1), int), 0, 1.0)
    with pytest.raises(AssertionError, match="q_len must be integers; it is float64"):
        call.value_operands((None, None), np.array([1.5]), one, 0, 1.0)
    with pytest.raises(AssertionError, match="says what B is"):
        call.value_operands((None, None), 1, 1, 0, 1.0)


# ---- the compiler at the end of it -----------------------------------------------------------------------------------


def test_without_the_dsl_the_error_says_where_was_looked(tmp_path, monkeypatch):
    from jax_fa4.ffi import compile as compiler

    def missing(plan, *, host_target):
        raise compiler.CompilerMissing("the DSL is not installed: pip install this")

    monkeypatch.setattr(compiler, "build", missing)
    where = store.Store([tmp_path / "store"])
    with pytest.raises(compiler.CompilerMissing) as error:
        call.compiled(Toy(), where)
    for text in ("sm_90a", "pip install this", str(tmp_path / "store"), store.ENV, where.key(Toy())[:16], repr(Toy())):
        assert text in str(error.value)


def test_without_the_dsl_the_error_tells_of_another_versions_bundle(tmp_path, monkeypatch):
    from jax_fa4.ffi import bundle
    from jax_fa4.ffi import compile as compiler

    def missing(plan, *, host_target):
        raise compiler.CompilerMissing("the DSL is not installed")

    monkeypatch.setattr(compiler, "build", missing)
    monkeypatch.setattr(store, "__version__", "0.0.7")
    bundle.write_manifest(store.Store([tmp_path / "store"]))
    monkeypatch.undo()
    monkeypatch.setattr(compiler, "build", missing)
    with pytest.raises(compiler.CompilerMissing, match=r"store was filled with another jax_fa4 0\.0\.7 \(here "):
        call.compiled(Toy(), store.Store([tmp_path / "store"]))


def test_a_stored_object_needs_no_compiler(tmp_path, monkeypatch):
    from jax_fa4.ffi import compile as compiler

    monkeypatch.setattr(
        compiler, "build", lambda plan, *, host_target: compiler.Built(OBJECT, compiler.Facts((), log="took 3 ms"))
    )
    made = call.compiled(Toy(), store.Store([tmp_path / "store"]))
    assert (made.object, made.facts) == (OBJECT, {"kernels": [], "serialised": []})  # the log is no fact
    monkeypatch.delattr(compiler, "build")
    assert call.compiled(Toy(), store.Store([tmp_path / "store"])) == made
