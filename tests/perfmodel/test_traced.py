"""Traces beside predictions: made-up ones of a TPU, whose figures can be worked out, and one of a program that runs here."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import tpu_programs
from perfmodel.test_schedule import ARRAY, V5E, compute, done, joined, laid_out, permute, program
from perfmodel.traces import Event, gpu_plane, plane, write_trace
from tilewright.hardware.links import slice_fabric
from tilewright.metrics.traced import OPERATIONS, PARTS, TRACED
from tilewright.parallel import rings
from tilewright.parallel.mesh import make_mesh
from tilewright.perfmodel.schedule import read_schedule
from tilewright.perfmodel.timeline import Timeline, simulate
from tilewright.perfmodel.traced import TraceComparison, compare, module_name, program_in
from tilewright.perfmodel.xplane import read_trace, self_times

# Nanobind's iterators have no module, which Python 3.13 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute")

HIDING = program(permute("s", "x0"), compute("c", "x1", 0.25), done("d", "s"), joined("c", "d"))
"""A permute of a millisecond under a fusion of a quarter of it."""

COUNTED = f"""HloModule m, is_scheduled=true

%inner (p: f32[4]) -> f32[4] {{
  ROOT %p = {ARRAY} parameter(0)
}}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %p.1 = (s32[], {ARRAY}) parameter(0)
  %n = s32[] get-tuple-element(%p.1), index=0
  %x = {ARRAY} get-tuple-element(%p.1), index=1
{compute("c", "x")}
  ROOT %next = (s32[], {ARRAY}) tuple(%n, %c)
}}

%condition (p: (s32[], f32[4])) -> pred[] {{
  %p.2 = (s32[], {ARRAY}) parameter(0)
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (x: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %x0 = (s32[], {ARRAY}) parameter(0)
  ROOT %loop = (s32[], {ARRAY}) while(%x0), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""


def text_of(hlo: str, name: str) -> str:
    """An instruction as a TPU's trace names it."""
    return next(line.strip().removeprefix("ROOT ") for line in hlo.splitlines() if f"%{name} = " in line)


def runs(hlo: str, begins: Sequence[float], seconds: float, *ops: Event, module: str = "m(7)") -> str:
    """The plane of a chip on which a program runs, with its operations at such times from the beginning of each run."""
    named = [(text_of(hlo, name) if f"%{name} = " in hlo else name, at, duration) for name, at, duration in ops]
    events = [(name, begin + at, duration) for begin in begins for name, at, duration in named]
    return plane("/device:TPU:0", {"XLA Modules": [(module, begin, seconds) for begin in begins], "XLA Ops": events})


def compared(hlo: str, trace: Path) -> TraceComparison:
    return compare(laid_out(hlo), hlo, program_in(read_trace(trace), "m"))


def by_name(found: TraceComparison) -> dict[str, tuple[float | None, float | None, str]]:
    return {op.name: (op.predicted_us, op.measured_us, op.part) for op in found.ops}


def test_waits_belong_to_the_end_of_a_transfer(tmp_path: Path):
    ops = ("s", 0, 2), ("c", 2, 300), ("d", 310, 900)
    found = compared(HIDING, write_trace(tmp_path, runs(HIDING, (100, 5000), 1220, *ops)))
    near = pytest.approx
    assert by_name(found) == {
        "d": (near(750, rel=1e-4), near(900), "exposed"),
        "c": (near(250, rel=1e-4), near(300), "compute"),
        "s": (0, near(2), "start"),
    }
    parts = {part["name"]: part for part in found.parts()}
    assert parts["exposed"]["measured_over_predicted"] == near(1.2, rel=1e-4)
    assert parts["between operations"]["measured_us"] == near(1220 - 1202)
    assert (parts["run"]["predicted_us"], parts["run"]["measured_us"]) == (near(1000, rel=1e-4), near(1220))
    assert sum(part["measured_us"] for part in found.parts()) == near(2 * 1220)
    record = found.record()
    assert (record["runs"], record["devices"], record["device_kind"]) == (2, 1, "TPU v5 lite")
    assert (record["matched_operations"], record["matched_share"], record["untraced_operations"]) == (3, 1, [])


def test_each_figure_is_declared(tmp_path: Path):
    record = compared(HIDING, write_trace(tmp_path, runs(HIDING, (0,), 10, ("c", 0, 10)))).record()
    assert list(record) == [*(metric.name for metric in TRACED[:-1]), "parts", "operations", "notes"]
    assert {name for part in record["parts"] for name in part} == {metric.name for metric in PARTS}
    assert {name for op in record["operations"] for name in op} == {metric.name for metric in OPERATIONS}
    assert record["untraced_operations"] == ["d"]
    assert record["untraced_us"] == pytest.approx(750, rel=1e-4)


def test_what_a_loop_contains_counts_once(tmp_path: Path):
    ops = ("loop", 0, 100), ("c", 1, 30), ("c", 32, 30), ("c", 63, 30)
    found = compared(COUNTED, write_trace(tmp_path, runs(COUNTED, (0,), 100, *ops)))
    assert by_name(found) == {
        "c": (pytest.approx(3000, rel=1e-4), pytest.approx(90), "compute"),
        "loop": (None, pytest.approx(10), "control"),
    }
    assert {op.name: (op.calls, op.predicted_calls) for op in found.ops} == {"c": (3, 3), "loop": (1, None)}


def test_medians_are_of_all_runs_on_all_devices(tmp_path: Path):
    for host, duration in (("a", 10), ("b", 20), ("c", 90)):
        write_trace(tmp_path, runs(HIDING, (0, 500), 100, ("c", 0, duration)), host=host)
    found = compared(HIDING, tmp_path)
    assert (found.program.devices, len(found.program.runs)) == (3, 6)
    assert by_name(found)["c"][1] == pytest.approx(20)


def test_of_several_traces_the_newest_is_read(tmp_path: Path):
    for session, duration in (("2026_11_26", 10), ("2026_11_27", 20)):
        write_trace(tmp_path, runs(HIDING, (0,), 100, ("c", 0, duration)), session=session)
    assert by_name(compared(HIDING, tmp_path))["c"][1] == pytest.approx(20)
    file = next(tmp_path.rglob("2026_11_26/*.xplane.pb"))
    assert by_name(compared(HIDING, file))["c"][1] == pytest.approx(10)


def test_another_programs_operations_are_not_taken_for_its_own(tmp_path: Path):
    """Neither by name nor, where the trace has the text, by shape."""
    other = HIDING.replace(ARRAY, "f32[64]{0}")
    trace = write_trace(tmp_path, runs(other, (0,), 100, ("c", 0, 10), ("d", 10, 20)))
    with pytest.raises(ValueError, match=r"found m\(7\): 0 of 2 traced operations match .* with 0% of the time"):
        compared(HIDING, trace)
    ops = ("c", 0, 30), ("fusion.99", 30, 10), ("d", 40, 5)
    found = compared(HIDING, write_trace(tmp_path, runs(HIDING, (0,), 100, *ops)))
    assert by_name(found)["fusion.99"] == (None, pytest.approx(10), "not in the program")
    assert found.matched_share == pytest.approx(35 / 45)


def test_a_program_is_found_by_its_name(tmp_path: Path):
    planes = [runs(HIDING, (at,), 100, ("c", 0, 10), module=name) for at, name in ((0, "m(1)"), (200, "m(2)"))]
    planes[1] = planes[1].replace("TPU:0", "TPU:1")
    programs = read_trace(write_trace(tmp_path, *planes))
    assert module_name(HIDING) == "m"
    with pytest.raises(ValueError, match=r"expected one program m in the trace, found m\(1\), m\(2\): choose one"):
        program_in(programs, "m")
    assert program_in(programs, "m", "m(2)").name == "m(2)"
    with pytest.raises(ValueError, match=r"expected the program step in the trace, found m\(1\), m\(2\)"):
        program_in(programs, "step")
    with pytest.raises(ValueError, match="expected the HLO text"):
        module_name("module @jit_f")


def test_what_is_no_trace_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="found none in"):
        read_trace(tmp_path)
    with pytest.raises(ValueError, match="found none in /device:GPU:0, /host:CPU"):
        read_trace(write_trace(tmp_path, plane("/device:GPU:0", {"Stream": [("k", 0, 1)]}), plane("/host:CPU", {})))
    file = tmp_path / "cut.xplane.pb"
    file.write_bytes(b"no protocol buffer")
    with pytest.raises(ValueError, match=r"to be a trace of jax\.profiler"):
        read_trace(file)


def test_kernels_of_a_gpus_streams_are_one_run(tmp_path: Path):
    """Lines other than streams repeat the kernels' times, and copies outside of programs name no instruction."""
    streams = {
        "Stream #13(Compute)": [("gemm", 0, 10, "dot.1"), ("loop_add", 20, 5, "fusion.2"), ("gemm", 30, 12, "dot.1")],
        "Stream #14(MemcpyD2H)": [("memcpy", 2, 40, "copy.3"), ("memcpy", 50, 9, "")],
        "XLA Ops": [("gemm", 0, 10, "dot.1")],
    }
    host = plane("/host:CPU", {"python": [("call", 0, 100)]})
    (program,) = read_trace(write_trace(tmp_path, gpu_plane(0, streams), host)).values()
    assert (program.name, program.device_kind, program.devices, len(program.runs)) == ("m(7)", "GPU", 1, 1)
    assert {name: op.calls for name, op in program.ops.items()} == {"dot.1": 2, "fusion.2": 1, "copy.3": 1}
    assert program.self_seconds(["dot.1"]) == pytest.approx(22e-6)
    assert program.self_seconds(program.ops) == pytest.approx(67e-6)
    assert program.seconds == pytest.approx(42e-6)
    two = read_trace(write_trace(tmp_path / "two", gpu_plane(0, streams), gpu_plane(1, streams)))["m(7)"]
    assert (two.devices, len(two.runs)) == (2, 2)


def predicted_events(timeline: Timeline, hlo: str) -> list[Event]:
    """What a TPU's trace would have if the prediction came true."""
    nodes = timeline.graph.nodes
    found = []
    for span in timeline.core:
        ends = (number for number, node in enumerate(nodes) if node.start == span.node and span.track != "compute")
        name = nodes[next(ends, span.node)].name
        found.append((text_of(hlo, name), 1e6 * span.begin_s, 1e6 * span.seconds))
    return found


@pytest.mark.parametrize("number", [10, 30, 50])
def test_what_the_compiler_writes_is_found_again(number: int, tmp_path: Path):
    """Programs as libtpu made them, in traces in which all took as long as predicted."""
    path = sorted(tpu_programs.KEPT.glob("*.xz"), key=lambda path: path.stat().st_size)[number]
    hlo = tpu_programs.read("v5e:4x4", path).hlo
    timeline = simulate(read_schedule(hlo, V5E), slice_fabric("v5e:4x4"))
    module = module_name(hlo)
    events = predicted_events(timeline, hlo)
    run = (f"{module}(1)", 0, 1e6 * timeline.whole().total_s)
    trace = write_trace(tmp_path, plane("/device:TPU:0", {"XLA Modules": [run], "XLA Ops": events}))
    found = compare(timeline, hlo, program_in(read_trace(trace), module))
    assert (found.matched_share, found.untraced) == (1, [])
    assert len(found.traced) == len({name for name, _, _ in events})
    for op in found.traced:
        # A trace has nanoseconds.
        assert op.measured_us == pytest.approx(op.predicted_us, abs=0.002 * (op.calls or 0))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12))
def test_self_times_cover_a_line_once(spans: list[tuple[int, int]]):
    """Of events that lie in one another or apart, as a core's do; others are cut to that here."""
    nested: list[SimpleNamespace] = []
    for begin, duration in sorted(spans, key=lambda span: (span[0], -span[1])):
        around = [one.start_ns + one.duration_ns for one in nested if one.start_ns + one.duration_ns > begin]
        nested.append(SimpleNamespace(start_ns=begin, duration_ns=min([begin + duration, *around]) - begin))
    covered = {at for one in nested for at in range(one.start_ns, one.start_ns + one.duration_ns)}
    assert sum(self_ns for _, self_ns in self_times(nested)) == len(covered)


def test_a_program_that_runs_here(tmp_path: Path):
    """A ring over two devices of this machine, as JAX's profiler sees it; its collectives are among the operations."""
    spec = PartitionSpec("blocks")
    mesh = make_mesh({"blocks": 2})

    def ring_sum(x: jax.Array) -> jax.Array:
        return rings.ring(lambda hop, visiting, total: total + (hop + 1) * visiting @ visiting, x, jnp.zeros_like(x), "blocks")

    x = np.ones((64, 32), np.float32)
    compiled = jax.jit(jax.shard_map(ring_sum, mesh=mesh, in_specs=spec, out_specs=spec)).lower(x).compile()
    jax.block_until_ready(compiled(x))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        for _ in range(3):
            jax.block_until_ready(compiled(x))
    hlo = str(compiled.as_text())
    fabric = slice_fabric("v5e:2x1")
    found = compare(simulate(read_schedule(hlo, V5E), fabric), hlo, program_in(read_trace(tmp_path), module_name(hlo)))
    assert (found.program.device_kind, found.program.devices, len(found.program.runs)) == ("CPU", 2, 6)
    assert found.matched_share == 1
    assert {op.opcode for op in found.traced if op.part == "exposed"} == {"collective-permute"}
    parts = {part["name"]: part["measured_us"] for part in found.parts()}
    assert min(parts["exposed"], parts["compute"]) > 0
    assert not found.untraced


def test_a_small_program_runs_on_pythons_thread(tmp_path: Path):
    compiled = jax.jit(lambda x: jnp.sin(x @ x).sum()).lower(np.ones((4, 4), np.float32)).compile()
    x = jnp.ones((4, 4))
    jax.block_until_ready(compiled(x))
    with jax.profiler.trace(tmp_path):
        for _ in range(2):
            jax.block_until_ready(compiled(x))
    program = program_in(read_trace(tmp_path), module_name(str(compiled.as_text())))
    assert len(program.runs) == 2
    assert program.seconds > 0
