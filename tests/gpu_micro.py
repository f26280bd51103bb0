"""Runs the micro-kernels of tests/emulator/cases.py on a Hopper card and in the emulator, and compares the bits.

`python tests/gpu_micro.py [part of a name]` on a machine with an H100 or H200 and its driver; needs numpy, nothing
else. The PTX text goes to the driver as it is. Exit status 1 if any case differs. Kernels of tests/micro join if
`--save FILE`, where the compiler is, has written the file that JAX_FA4_MICRO names.
"""

import ctypes
import os
import pickle
import sys

import numpy as np
from emulator import Launch, Opaque, Pointer, Tma, Uninitialised, run
from emulator.cases import Case, cases

DTYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, then 64 bytes of value at offset 8."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


class Card:
    """The first device, through the driver's documented calls."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        name = ctypes.create_string_buffer(100)
        self.call("cuDeviceGetName", name, 100, device)
        self.name = name.value.decode()

    def call(self, name, *args):
        status = getattr(self.driver, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {status} {(text.value or b'').decode()}")

    def function(self, ptx, shared, entry):
        module, function, log = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER, its size
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), 4096)
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode() + b"\0", 2, options, values)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{log.value.decode()}") from None
        self.call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        self.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
        return module, function

    def upload(self, value):
        """(address, bytes, shape, dtype) of a buffer; Uninitialised becomes 0xFF."""
        if isinstance(value, Uninitialised):
            array = np.full(value.shape, 0, value.dtype)
            array.view(np.uint8)[...] = 0xFF
        else:
            array = np.ascontiguousarray(value)
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(array.nbytes))
        self.call("cuMemcpyHtoD_v2", address, array.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(array.nbytes))
        return address, array

    def tensor_map(self, tma, address):
        """128 bytes at a multiple of 64, made by the driver."""
        raw = ctypes.create_string_buffer(192)
        start = -ctypes.addressof(raw) % 64
        rank = len(tma.dims)
        words = lambda values, kind: (kind * len(values))(*values)  # noqa: E731
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.byref(raw, start),
            DTYPES[tma.dtype],
            ctypes.c_uint(rank),
            ctypes.c_void_p(address.value + tma.offset),
            words(tma.dims, ctypes.c_uint64),
            words(tma.strides or (0,), ctypes.c_uint64),
            words(tma.box, ctypes.c_uint),
            words((1,) * rank, ctypes.c_uint),
            0,
            SWIZZLES[tma.swizzle],
            0,
            int(tma.fill == "nan"),
        )
        return raw, start

    def run(self, case):
        """{buffer: array} after the launch."""
        module, function = self.function(case.ptx, case.shared, case.entry or "k")
        held = {name: self.upload(value) for name, value in case.memory.items()}
        keep, pointers = [], []
        for p in case.params:
            if isinstance(p, Tma):
                raw, start = self.tensor_map(p, held[p.buffer][0])
                pointers.append(ctypes.addressof(raw) + start)
                keep.append(raw)
                continue
            if isinstance(p, Opaque):
                keep.append(ctypes.create_string_buffer(p.data, len(p.data)))
                pointers.append(ctypes.addressof(keep[-1]))
                continue
            word = (
                ctypes.c_uint64(held[p.buffer][0].value + p.offset)
                if isinstance(p, Pointer)
                else ctypes.c_uint32(int(p.value) & 0xFFFFFFFF)
            )
            keep.append(word)
            pointers.append(ctypes.addressof(word))
        arguments = (ctypes.c_void_p * len(pointers))(*pointers)
        cluster = Attribute(CLUSTER_DIMENSION)
        cluster.value[0], cluster.value[1], cluster.value[2] = case.cluster, 1, 1
        config = Config((case.cluster, 1, 1), (case.block, 1, 1), case.shared, None, ctypes.pointer(cluster), 1)
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, arguments, None)
        self.call("cuCtxSynchronize")
        out = {}
        for name, (address, array) in held.items():
            out[name] = np.empty_like(array)
            target = out[name].ctypes.data_as(ctypes.c_void_p)
            self.call("cuMemcpyDtoH_v2", target, address, ctypes.c_size_t(array.nbytes))
            self.call("cuMemFree_v2", address)
        self.call("cuModuleUnload", module)
        return out


def emulate(case, seed):
    launch = Launch(
        tuple(case.params),
        grid=(case.cluster, 1, 1),
        block=(case.block, 1, 1),
        cluster=(case.cluster, 1, 1),
        shared_bytes=case.shared,
    )
    return run(case.ptx, launch, case.memory, seed=seed, exact=True).check().outputs


def apart(a, b, ulp):
    """(elements that differ by more than `ulp`, largest distance). NaN equals NaN: their bits are not specified."""
    x, y = (np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in (a, b))
    if np.array_equal(x, y):
        return 0, 0
    if a.dtype.itemsize != 4:
        return int((x != y).sum()), -1
    f, g = x.view(np.float32), y.view(np.float32)
    key = [
        np.where(v < 0, -(v & 0x7FFFFFFF), v)
        for v in (x.view(np.int32).astype(np.int64), y.view(np.int32).astype(np.int64))
    ]
    distance = np.where(np.isnan(f) & np.isnan(g), 0, np.abs(key[0] - key[1]))
    return int((distance > ulp).sum()), int(distance.max())


def compare(card, case):
    """(does it differ, text)."""
    want, notes, wrong = card.run(case), [], False
    for seed in (0, 3):
        got = emulate(case, seed)
        for name in case.memory:
            differ, most = apart(got[name], want[name], case.ulp)
            if differ:
                wrong = True
                x, y = (np.ascontiguousarray(v).reshape(-1).view(np.uint8) for v in (got[name], want[name]))
                at = int(np.flatnonzero(x != y)[0]) // 4 * 4
                here, there = (v[at : at + 4].tobytes().hex() for v in (x, y))
                notes.append(f"seed {seed}, {name}: {differ} differ, by up to {most}; byte {at}: {here}, card {there}")
            elif most and seed == 0:
                notes.append(f"within {most} ulp of {case.ulp}")
    return wrong, "; ".join(notes)


def compiled():
    """Cases of the micro-kernels of clusters, compiled for Hopper: needs the DSL."""
    from launch import to_emulator
    from micro import build
    from test_micro_cluster import CALLS, MICROS

    for name in (name for name, arch in CALLS if arch == "sm_90a"):
        micro, memory, want = MICROS[name]()
        launch = to_emulator(build.launched(micro, build.ptx(micro, "sm_90a")))
        memory = memory | {"out": Uninitialised(want.shape, np.float32)}
        where = {"block": launch.block[0], "cluster": launch.cluster[0], "shared": launch.shared_bytes}
        yield Case(f"compiled {name}", build.ptx(micro, "sm_90a"), launch.params, memory, **where, entry=launch.entry)


def main(part="", start="0", bad="0"):
    """Runs what is left from `start`. A kernel that the card aborts spoils the process: the rest runs in a new one."""
    card, wrong = Card(), int(bad)
    saved = os.environ.get("JAX_FA4_MICRO")
    more = pickle.loads(open(saved, "rb").read()) if saved else []
    chosen = [case for case in (*cases(), *more) if part in case.name]
    if start == "0":
        print(card.name, flush=True)
    for number, case in enumerate(chosen[int(start) :], int(start)):
        try:
            differs, text = compare(card, case)
        except RuntimeError as error:
            print("FAILED ", case.name, error, flush=True)
            os.execv(sys.executable, [sys.executable, __file__, part, str(number + 1), str(wrong + 1)])
        wrong += differs
        print("DIFFERS" if differs else "equal  ", case.name, text, flush=True)
    print(f"{len(chosen)} kernels, {wrong} differ or failed")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        made = list(compiled())
        with open(sys.argv[2], "wb") as file:
            pickle.dump(made, file)
    else:
        sys.exit(main(*sys.argv[1:]))
