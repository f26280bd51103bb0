"""The store: built once, found again, never believed blindly, and never in the way when its folder is no good."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from store_fakes import FakePlan, fake_build, never, object_of

from jax_fa4.ffi import bundle, store
from jax_fa4.ffi.artifact import Artifact
from jax_fa4.ffi.store import COUNTED, SUFFIX, Store, StoreWarning

ROOT = Path(store.__file__).resolve().parents[2]
NOBODY = 65534
PATIENCE = 200  # seconds for child processes on a busy machine


def counted(**kinds):
    return dict.fromkeys(COUNTED, 0) | kinds


def child(code: str, *, user: int | None = None, **env: str) -> subprocess.Popen:
    """A Python process with the store and the fakes (as `t`); as another user where we are root.

    The package's own __init__ brings jax, which the store does not need and which dozens of children would pay for.
    """
    head = (
        f"import os, sys, types, warnings; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        f"bare = sys.modules['jax_fa4'] = types.ModuleType('jax_fa4'); bare.__path__ = [{str(store.PACKAGE)!r}]\n"
        "import store_fakes as t; from jax_fa4.ffi.store import *\n"
    )
    if user is not None:
        # What is imported late must be imported now: the other user may not read where Python is installed.
        head += "import email.parser; installed_dsl()\n"
        head += f"os.setgroups([]); os.setgid({user}); os.setuid({user})\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    return out.strip()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


@pytest.fixture(autouse=True)
def quiet_unless_said():
    """A warning that a test does not expect is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        yield


# ---- finding again ---------------------------------------------------------------------------------------------------


def test_built_once_then_memory_then_disk(folder):
    first = Store([folder])
    plan = FakePlan()
    made = first.get(plan, build=fake_build)
    assert made.object == object_of(plan)
    assert (made.plan, made.arch, made.key) == (repr(plan), "sm_90a", first.key(plan))
    assert first.counters() == counted(builds=1, misses=1)
    assert first.get(plan, build=never) is made
    assert first.counters() == counted(builds=1, misses=1, memory_hits=1)
    second = Store([folder])
    assert second.get(plan, build=never) == made  # facts too: the same from memory and from disk
    assert second.counters() == counted(disk_hits=1)
    second.reset_counters()
    assert second.counters() == counted()


def test_find_builds_nothing(folder):
    first = Store([folder])
    assert first.find(FakePlan()) is None
    first.get(FakePlan(), build=fake_build)
    assert first.find(FakePlan()) is not None
    assert Store([folder]).find(FakePlan()).object == object_of(FakePlan())
    assert first.counters() == counted(builds=1, misses=1)


def test_private_modes_whatever_the_umask(folder):
    old = os.umask(0)
    try:
        Store([folder]).get(FakePlan(), build=fake_build)
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [p for p in folder.iterdir() if p.is_file()]
    assert any(p.name.endswith(SUFFIX) for p in files)
    assert {p.name: p.stat().st_mode & 0o777 for p in files} == {p.name: 0o600 for p in files}
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*.tmp"))


def test_a_failed_build_leaves_nothing_and_may_be_tried_again(folder):
    kept = Store([folder])

    def broken(plan, *, host_target):
        raise RuntimeError("ptxas said no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="ptxas said no"):
            kept.get(FakePlan(), build=broken)
    assert kept.counters() == counted(misses=2)
    assert not list(folder.glob("*" + SUFFIX))
    assert kept.get(FakePlan(), build=fake_build).object == object_of(FakePlan())


def test_a_disk_hit_takes_at_most_50_ms(folder):
    Store([folder]).get(FakePlan(), build=fake_build)
    times = []
    for _ in range(5):
        kept = Store([folder])
        start = time.perf_counter()
        kept.get(FakePlan(), build=never)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.050, f"{min(times) * 1e3:.1f} ms"


# ---- the key ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path):
    """A copy of the sources that objects depend on, to edit."""
    copy = tmp_path / "package"
    for path in store.kernel_sources():
        to = copy / path.relative_to(store.PACKAGE)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, to)
    return copy


def test_the_key_depends_on_everything_that_the_bytes_depend_on(package, monkeypatch):
    def key(plan=None, **how):
        return Store([], package=package, **how).key(plan or FakePlan())

    keys = [key(), key(FakePlan(depth=128)), key(FakePlan(arch="sm_100a")), key(host_target="linux-aarch64")]
    monkeypatch.setattr(store, "installed_dsl", lambda: "4.8.2")
    keys.append(key())
    monkeypatch.setattr(store, "__version__", "99")
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[-1]


def test_the_key_is_that_of_another_process(folder):
    for seed in ("1", "2"):
        out = result(child("print(Store([]).key(t.FakePlan()))", PYTHONHASHSEED=seed))
        assert out == Store([]).key(FakePlan())


@pytest.mark.parametrize("name", ["mask.py", "ffi/buffers.py", "ffi/compile.py", "kernels/common/parts.py"])
def test_an_edited_source_misses(folder, package, name):
    plan = FakePlan()
    Store([folder], package=package).get(plan, build=fake_build)
    assert Store([folder], package=package).find(plan) is not None
    with open(package / name, "a") as file:
        file.write("\n# edited")
    assert Store([folder], package=package).find(plan) is None


def test_a_new_or_renamed_kernel_file_misses(folder, package):
    plan = FakePlan()
    before = Store([folder], package=package).key(plan)
    new = package / "kernels" / "common" / "new.py"
    new.write_text("x = 1\n")
    after = Store([folder], package=package).key(plan)
    new.rename(new.with_name("newer.py"))
    assert len({before, after, Store([folder], package=package).key(plan)}) == 3


def test_sources_edited_while_running_stay_in_memory(folder, package):
    """Such a process may run the old text or the new; its objects must not be found under either key."""
    kept = Store([folder], package=package)

    def edit_and_build(plan, *, host_target):
        (package / "mask.py").write_text("# new\n")
        return fake_build(plan, host_target=host_target)

    with pytest.warns(StoreWarning, match="sources changed"):
        assert kept.get(FakePlan(), build=edit_and_build).object == object_of(FakePlan())
    assert not list(folder.glob("*" + SUFFIX))
    kept.get(FakePlan(), build=never)


# ---- damage ----------------------------------------------------------------------------------------------------------


def damage(kind: str, data: bytes) -> bytes:
    middle = len(data) // 2
    return {
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "truncated": data[:-1],
        "half": data[:middle],
        "extended": data + b"\0",
        "empty": b"",
        "random": os.urandom(len(data)),
    }[kind]


@pytest.mark.parametrize("kind", ["flipped", "truncated", "half", "extended", "empty", "random"])
def test_a_damaged_entry_is_built_again_and_replaced(folder, kind):
    plan = FakePlan()
    first = Store([folder])
    first.get(plan, build=fake_build)
    path = folder / (first.key(plan) + SUFFIX)
    whole = path.read_bytes()
    path.write_bytes(damage(kind, whole))
    second = Store([folder])
    with pytest.warns(StoreWarning, match="is not used"):
        assert second.get(plan, build=fake_build).object == object_of(plan)
    assert second.counters() == counted(builds=1, misses=1, corrupt=1)
    assert path.read_bytes() == whole
    assert Store([folder]).get(plan, build=never).object == object_of(plan)


def test_a_foreign_entry_under_a_right_name_is_not_loaded(folder):
    first = Store([folder])
    one, other = FakePlan(64), FakePlan(128)
    first.get(one, build=fake_build)
    first.get(other, build=fake_build)
    shutil.copy(folder / (first.key(other) + SUFFIX), folder / (first.key(one) + SUFFIX))
    second = Store([folder])
    with pytest.warns(StoreWarning, match="not that of its name"):
        assert second.get(one, build=fake_build).object == object_of(one)
    assert second.counters() == counted(builds=1, misses=1, corrupt=1)
    assert Store([folder]).get(one, build=never).object == object_of(one)


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "writable"])
def test_an_entry_that_is_no_private_file_is_not_loaded(folder, tmp_path, kind):
    plan = FakePlan()
    first = Store([folder])
    first.get(plan, build=fake_build)
    path = folder / (first.key(plan) + SUFFIX)
    kept = tmp_path / "kept"
    path.rename(kept)
    if kind == "link":
        path.symlink_to(kept)
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        shutil.copy(kept, path)
        path.chmod(0o666)
    second = Store([folder])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert second.get(plan, build=fake_build).object == object_of(plan)
    why = {"link": "symbolic links", "folder": "directory", "fifo": "not a regular file", "writable": "mode 0666"}[kind]
    assert any("is not used" in str(w.message) and why in str(w.message) for w in said)
    assert second.counters() == counted(builds=1, misses=1, corrupt=1)
    if kind != "folder":  # a file cannot be renamed over a folder: that stays a miss
        assert Store([folder]).get(plan, build=never).object == object_of(plan)


# ---- folders that cannot be used -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(folder, mode):
    plan = FakePlan()
    Store([folder]).get(plan, build=fake_build)
    folder.chmod(mode)
    with pytest.warns(StoreWarning, match=f"mode 0{mode:o}.*chmod go-w") as said:
        other = Store([folder])
    assert len(said) == 1
    assert other.home is None and other.folders == []
    assert other.get(plan, build=fake_build).object == object_of(plan)
    assert other.counters() == counted(builds=1, misses=1)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to another user")


@needs_root
@pytest.mark.parametrize("what", ["folder", "entry"])
def test_what_belongs_to_another_user_is_not_used(folder, what):
    plan = FakePlan()
    first = Store([folder])
    first.get(plan, build=fake_build)
    os.chown(folder if what == "folder" else folder / (first.key(plan) + SUFFIX), NOBODY, NOBODY)
    with pytest.warns(StoreWarning, match=f"belongs to user {NOBODY}"):
        other = Store([folder])
        other.get(plan, build=fake_build)
    assert other.counters()["builds"] == 1


READ_ONLY = """
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    s = Store([os.environ["FOLDER"]])
    assert s.get(t.FakePlan(64), build=t.never).object == t.object_of(t.FakePlan(64))
    assert not said, [str(w.message) for w in said]
    for depth in (128, 192):
        assert s.get(t.FakePlan(depth), build=t.fake_build).object == t.object_of(t.FakePlan(depth))
        s.get(t.FakePlan(depth), build=t.never)
print(s.counters(), [str(w.message) for w in said if w.category is StoreWarning])
"""


def test_a_read_only_folder_serves_what_it_has(tmp_path):
    """As root everything can be written to, so a process of another user tries."""
    folder = tmp_path / "store"
    Store([folder]).get(FakePlan(), build=fake_build)
    user = NOBODY if os.geteuid() == 0 else None
    if user is not None:  # root's folder, readable by all: what an installed bundle is
        for path in (folder, *tmp_path.parents, tmp_path):
            with contextlib.suppress(PermissionError):
                path.chmod(path.stat().st_mode | 0o055)
        for path in folder.iterdir():
            path.chmod(0o644)
    folder.chmod(0o555)
    try:
        out = result(child(READ_ONLY, user=user, FOLDER=str(folder)))
    finally:
        folder.chmod(0o755)
    assert str(counted(builds=2, misses=2, disk_hits=1, memory_hits=2)) in out
    assert out.count("jax_fa4: ") == 1, out  # one warning for two builds
    assert len(list(folder.glob("*" + SUFFIX))) == 1


DISK_FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # no file grows past this: writing fails as on a full disk
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    s = Store([os.environ["FOLDER"]])
    for depth in (128, 192):
        assert s.get(t.FakePlan(depth), build=t.fake_build).object == t.object_of(t.FakePlan(depth))
        s.get(t.FakePlan(depth), build=t.never)
print(s.counters(), [str(w.message) for w in said if w.category is StoreWarning])
"""


def test_a_full_disk_leaves_nothing_half_written(folder):
    out = result(child(DISK_FULL, FOLDER=str(folder)))
    assert str(counted(builds=2, misses=2, memory_hits=2)) in out
    assert out.count("jax_fa4: cannot write to the store") == 1, out
    assert [p.name for p in folder.iterdir() if not p.name.endswith(".lock")] == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(StoreWarning, match="cannot make the store") as said:
        kept = Store([tmp_path / "file" / "store"])
    assert len(said) == 1
    assert kept.home is None
    assert kept.get(FakePlan(), build=fake_build).object == object_of(FakePlan())
    assert kept.get(FakePlan(), build=never).object == object_of(FakePlan())


def test_memory_only():
    kept = Store()
    kept.get(FakePlan(), build=fake_build)
    kept.get(FakePlan(), build=never)
    assert kept.counters() == counted(builds=1, misses=1, memory_hits=1)


# ---- several folders, the environment -------------------------------------------------------------------------------


def test_bundles_are_read_and_not_written(tmp_path):
    home, one, two = (tmp_path / n for n in ("home", "one", "two"))
    Store([one]).get(FakePlan(64), build=fake_build)
    Store([two]).get(FakePlan(128), build=fake_build)
    before = {p: p.read_bytes() for f in (one, two) for p in f.iterdir()}
    kept = Store([home, one, two])
    assert kept.folders == [home, one, two]
    for depth in (64, 128):
        assert kept.get(FakePlan(depth), build=never).object == object_of(FakePlan(depth))
    kept.get(FakePlan(192), build=fake_build)
    assert kept.counters() == counted(builds=1, misses=1, disk_hits=2)
    assert {p: p.read_bytes() for f in (one, two) for p in f.iterdir()} == before
    assert len(list(home.glob("*" + SUFFIX))) == 1


def test_a_damaged_entry_in_front_does_not_hide_a_whole_one(tmp_path):
    plan = FakePlan()
    for name in ("home", "bundle"):
        Store([tmp_path / name]).get(plan, build=fake_build)
    kept = Store([tmp_path / "home", tmp_path / "bundle"])
    (tmp_path / "home" / (kept.key(plan) + SUFFIX)).write_bytes(b"junk")
    with pytest.warns(StoreWarning):
        assert kept.get(plan, build=never).object == object_of(plan)
    assert kept.counters() == counted(disk_hits=1, corrupt=1)


def test_the_environment_names_the_folders(tmp_path, monkeypatch):
    home, other = tmp_path / "home", tmp_path / "other"
    other.mkdir(mode=0o700)
    monkeypatch.setenv(store.ENV, os.pathsep.join([str(home), str(other)]))
    kept = store.default_store()
    assert kept.folders == [home, other] and store.default_store() is kept
    kept.get(FakePlan(), build=fake_build)
    assert store.counters() == counted(builds=1, misses=1)
    store.reset_counters()
    assert store.counters() == counted()
    monkeypatch.setenv(store.ENV, str(other))
    assert store.default_store().folders == [other]
    monkeypatch.delenv(store.ENV)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert store.default_store().folders == [tmp_path / "cache" / "jax_fa4"]


def test_a_bundle_serves_a_machine_without_the_dsl(tmp_path, monkeypatch):
    """Built under some version of the DSL; the manifest tells it to a machine that has none, else the pinned one."""
    monkeypatch.setattr(store, "installed_dsl", lambda: "4.9.9")
    built = Store([tmp_path / "bundle"])
    built.get(FakePlan(), build=fake_build)
    monkeypatch.setattr(store, "installed_dsl", lambda: None)
    assert Store([tmp_path / "home", tmp_path / "bundle"]).find(FakePlan()) is None
    bundle.write_manifest(built)
    there = Store([tmp_path / "home", tmp_path / "bundle"])
    assert there.versions["dsl"] == "4.9.9"
    assert there.get(FakePlan(), build=never).object == object_of(FakePlan())
    assert Store([tmp_path / "home"]).versions["dsl"] == store.PINNED_DSL


def test_a_manifest_of_other_sources_or_junk_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "installed_dsl", lambda: None)
    folder = tmp_path / "bundle"
    folder.mkdir(mode=0o700)
    other = {"versions": {"dsl": "1.2.3", "jax_fa4": "1", "sources": "0" * 64}, "host_target": "x86-64-v2"}
    for text in (json.dumps(other), "[]", "{", '{"versions": 3}', '{"versions": {}}', ""):
        (folder / store.MANIFEST).write_text(text)
        assert Store([folder]).versions["dsl"] == store.PINNED_DSL


def test_the_pinned_dsl_is_that_of_the_project_file():
    assert f'"nvidia-cutlass-dsl=={store.PINNED_DSL}"' in (ROOT / "pyproject.toml").read_text()


def test_a_bundle_that_serves_nothing_says_why(tmp_path, package):
    folder = tmp_path / "bundle"
    made = Store([folder], package=package)
    bundle.write_manifest(made)
    assert made.mismatches() == []
    (package / "mask.py").write_text("# edited")
    edited = Store([folder], package=package, host_target="linux-aarch64")
    (line,) = edited.mismatches()
    for text in (str(folder), "sources", made.versions["sources"][:16], edited.versions["sources"][:16]):
        assert text in line
    assert f"host_target {made.host_target} (here linux-aarch64)" in line and "dsl" not in line


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_threads_build_once(folder):
    kept = Store([folder])
    started, all_here = [], threading.Barrier(16)

    def build(plan, *, host_target):
        started.append(plan)
        time.sleep(0.05)
        return fake_build(plan, host_target=host_target)

    def ask(plan):
        all_here.wait()
        assert kept.get(plan, build=build).object == object_of(plan)

    threads = [threading.Thread(target=ask, args=(FakePlan(64 * (1 + n % 2)),)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(p.depth for p in started) == [64, 128]
    assert kept.counters() == counted(builds=2, misses=2, memory_hits=14)


HAMMER = """
s = Store([os.environ["FOLDER"]])
assert s.get(t.FakePlan(), build=t.slow_logged_build).object == t.object_of(t.FakePlan())
print(s.counters()["builds"], s.counters()["disk_hits"])
"""


def test_eight_processes_build_once(folder, tmp_path):
    (tmp_path / "log").touch()
    processes = [child(HAMMER, FOLDER=str(folder), BUILD_LOG=str(tmp_path / "log")) for _ in range(8)]
    outs = sorted(result(p) for p in processes)
    assert outs == ["0 1"] * 7 + ["1 0"]
    assert len((tmp_path / "log").read_text().split("\n")) - 1 == 2  # one start, one end


def test_a_killed_builder_costs_its_build_alone(folder, tmp_path):
    """Whoever holds the lock is killed mid-build, twice; the others go on, one of them builds, nothing is broken."""
    log_path = tmp_path / "log"
    log_path.touch()
    processes = [child(HAMMER, FOLDER=str(folder), BUILD_LOG=str(log_path)) for _ in range(8)]
    killed = set()
    deadline = time.monotonic() + PATIENCE
    while len(killed) < 2 and time.monotonic() < deadline:
        starts = [int(line.split()[1]) for line in log_path.read_text().split("\n") if line.startswith("start")]
        for pid in set(starts) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            break
        time.sleep(0.005)
    assert len(killed) == 2
    outs = []
    for process in processes:
        out, err = process.communicate(timeout=PATIENCE)
        if process.pid in killed:
            assert process.returncode == -signal.SIGKILL
        else:
            assert process.returncode == 0, err
            outs.append(out.strip())
    assert sorted(outs) == ["0 1"] * 5 + ["1 0"]
    lines = log_path.read_text().split("\n")
    assert sum(line.startswith("start") for line in lines) == 3
    assert sum(line.startswith("end") for line in lines) == 1
    assert Store([folder]).get(FakePlan(), build=never).object == object_of(FakePlan())


KILLED_WRITING = """
from jax_fa4.ffi import store
def stop(*_):
    print("writing", flush=True)
    os.kill(os.getpid(), 9)
store.os.fsync = stop
Store([os.environ["FOLDER"]]).get(t.FakePlan(), build=t.fake_build)
"""


def test_killed_while_writing(folder):
    """Half an entry never stands under its name; what is left of it is cleaned away later."""
    process = child(KILLED_WRITING, FOLDER=str(folder))
    out, err = process.communicate(timeout=PATIENCE)
    assert (out.strip(), process.returncode) == ("writing", -signal.SIGKILL), err
    (left,) = folder.glob(".*.tmp")
    assert not list(folder.glob("*" + SUFFIX))
    old = time.time() - 2 * store.LOCK_SECONDS
    os.utime(left, (old, old))
    kept = Store([folder])
    kept.get(FakePlan(), build=fake_build)
    assert kept.counters() == counted(builds=1, misses=1)
    assert not list(folder.glob(".*.tmp"))
    Store([folder]).get(FakePlan(), build=never)


def test_a_lock_that_is_never_given_back_does_not_stop_us(folder, monkeypatch):
    import filelock

    kept = Store([folder])
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.2)
    with filelock.FileLock(str(folder / (kept.key(FakePlan()) + ".lock"))):
        with pytest.warns(StoreWarning, match="cannot lock"):
            assert kept.get(FakePlan(), build=fake_build).object == object_of(FakePlan())
    Store([folder]).get(FakePlan(), build=never)


# ---- bundles ---------------------------------------------------------------------------------------------------------


def test_precompile_fills_a_store_and_tells_what_is_in_it(folder):
    plans = [FakePlan(d, a) for d in (64, 128, 192) for a in ("sm_90a", "sm_100a")]
    kept = Store([folder])
    entries = bundle.precompile([*plans, plans[0]], kept, jobs=2, progress=False, builder="store_fakes:fake_build")
    assert [e.plan for e in entries] == [repr(p) for p in plans]
    assert all(e.bytes == len(object_of(plans[0])) and e.seconds > 0 for e in entries)
    there = Store([folder])
    for plan in plans:
        assert there.get(plan, build=never).object == object_of(plan)
    assert there.counters() == counted(disk_hits=6)
    manifest = bundle.read_manifest(folder)
    assert manifest["versions"] == kept.versions and manifest["host_target"] == kept.host_target
    assert sorted(e["key"] for e in manifest["entries"]) == sorted(kept.key(p) for p in plans)
    assert manifest["bytes"] == 6 * len(object_of(plans[0]))
    # Again: nothing to do, no worker is started (the builder does not exist), and the manifest stays whole.
    more = bundle.precompile(plans[:1], Store([folder]), progress=False, builder="nowhere:build")
    assert [e.seconds for e in more] == [0.0]
    assert len(bundle.read_manifest(folder)["entries"]) == 6


def test_precompile_survives_what_kills_a_worker(folder):
    """An abort and an exception cost their own plans; the rest is built and listed; the error names the plans."""
    plans = [FakePlan(d) for d in (13, 14, 64, 128)]
    with pytest.raises(bundle.BundleError) as error:
        bundle.precompile(plans, Store([folder]), jobs=2, progress=False, builder="store_fakes:failing_build")
    text = str(error.value)
    assert "2 of 4 plans" in text
    assert "FakePlan(depth=13" in text and f"exit status -{int(signal.SIGABRT)}" in text
    assert "FakePlan(depth=14" in text and "ValueError: depth 14 is not for us" in text
    assert {p.depth for p, _ in error.value.failures} == {13, 14}
    assert len(bundle.read_manifest(folder)["entries"]) == 2


def test_precompile_needs_a_folder():
    with pytest.raises(ValueError, match="folder"):
        bundle.precompile([FakePlan()], Store(), progress=False)


def test_the_same_plan_gives_the_same_file(tmp_path):
    names = set()
    for name in ("one", "two"):
        kept = Store([tmp_path / name])
        kept.get(FakePlan(), build=fake_build)
        (path,) = (tmp_path / name).glob("*" + SUFFIX)
        names.add((path.name, path.read_bytes()))
    assert len(names) == 1


def test_an_artifact_of_the_store_says_what_it_was_built_from(folder):
    kept = Store([folder])
    kept.get(FakePlan(), build=fake_build)
    read = Artifact.from_bytes((folder / (kept.key(FakePlan()) + SUFFIX)).read_bytes())
    assert read.versions == kept.versions and set(read.versions) == {"jax_fa4", "dsl", "sources"}
    assert read.host_target == kept.host_target
    assert read.facts == {"host": kept.host_target, "registers": [168]}
