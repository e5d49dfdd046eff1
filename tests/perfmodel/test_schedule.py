"""Reading schedules, every spelling, and the model of their time: texts written by hand, whose figures can be worked out.

A chip of these texts is a v5e in a square of four. `CYCLES` of it are a millisecond, and so are `BYTES` over one link.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.hardware.links import Fabric, torus_of
from tilewright.hardware.tpu import CHIPS
from tilewright.perfmodel.schedule import Node, ScheduledTransfer, ScheduleGraph, read_schedule
from tilewright.perfmodel.timeline import Timeline, TimelineTotals, simulate, trace

V5E = CHIPS["v5e"]
SQUARE = Fabric(V5E, torus_of(V5E, (2, 2)), ((0, 0), (1, 0), (1, 1), (0, 1)), hop_us=0.0)
CYCLES = round(1e6 * V5E.clock_ghz)
ELEMENTS = 12_500_000
BYTES = 4 * ELEMENTS
ARRAY = f"f32[{ELEMENTS}]{{0}}"
MEMORY_MS = 1e3 * BYTES / (1e9 * V5E.hbm_gb_per_s)
AHEAD = "{{0,1},{1,2},{2,3},{3,0}}"
BACK = "{{1,0},{2,1},{3,2},{0,3}}"
GROUPS = "replica_groups={{0,1,2,3}}"


def compute(name: str, operand: str, ms: float = 1) -> str:
    """A fusion that takes so long."""
    config = f'backend_config={{"estimated_cycles":"{round(ms * CYCLES)}"}}'
    return f"  %{name} = {ARRAY} fusion(%{operand}), kind=kLoop, calls=%inner, {config}"


def program(*lines: str, before: str = "", inputs: int = 2) -> str:
    """A module around these lines, the last of which is its result; inputs are x0, x1, …, of layers 0, 1, …."""
    given = [f'  %x{n} = {ARRAY} parameter({n}), metadata={{op_name="layers[{n}].w"}}' for n in range(inputs)]
    *body, last = lines
    inner = f"%inner (p: f32[4]) -> f32[4] {{\n  ROOT %p = {ARRAY} parameter(0)\n}}\n"
    entry = "\n".join([*given, *body, "  ROOT" + last.removeprefix(" ")])
    return f"HloModule m, is_scheduled=true\n\n{inner}\n{before}\nENTRY %main (x: f32[4]) -> f32[4] {{\n{entry}\n}}\n"


def layer_of(name: str) -> int | None:
    return int(name[7]) if name.startswith("layers[") else None


def laid_out(text: str, fabric: Fabric = SQUARE) -> Timeline:
    return simulate(read_schedule(text, V5E, layer_of), fabric)


def ms(sums: TimelineTotals) -> tuple[float, float, float, float]:
    """Total, exposed, hidden, waiting for memory."""
    return tuple(1e3 * each for each in (sums.total_s, sums.exposed_s, sums.hidden_s, sums.memory_wait_s))  # type: ignore[return-value]


def near(*expected: float) -> object:
    return pytest.approx(expected, rel=1e-5, abs=1e-9)


def permute(name: str, operand: str, pairs: str = AHEAD) -> str:
    return f"  %{name} = ({ARRAY}, {ARRAY}, u32[], u32[]) collective-permute-start(%{operand}), source_target_pairs={pairs}"


def done(name: str, start: str, opcode: str = "collective-permute-done") -> str:
    return f"  %{name} = {ARRAY} {opcode}(%{start})"


def joined(*names: str) -> str:
    return f"  %end = ({', '.join([ARRAY] * len(names))}) tuple({', '.join('%' + name for name in names)})"


@pytest.mark.parametrize("compute_ms, expected", [(0.25, (1.0, 0.75, 0.25, 0)), (1, (1, 0, 1, 0)), (3, (3, 0, 1, 0))])
def test_a_permute_is_hidden_as_far_as_there_is_compute(compute_ms: float, expected: tuple[float, ...]):
    timeline = laid_out(program(permute("s", "x0"), compute("c", "x1", compute_ms), done("d", "s"), joined("c", "d")))
    assert ms(timeline.whole()) == near(*expected)
    assert timeline.whole().sent_bytes == BYTES
    assert timeline.whole().transfers == 1


WRAPPED = f"""%wrapped (p: f32[4]) -> f32[4] {{
  %p = {ARRAY} parameter(0)
  ROOT %rs = {ARRAY} reduce-scatter(%p), {GROUPS}, dimensions={{0}}
}}
"""
BEGUN = 'backend_config={"async_collective_fusion_config":{"flag_start":"-1"}}'
FUSED = f"""%starting (p: f32[4]) -> f32[4] {{
  %p = {ARRAY} parameter(0)
  %ag.1 = {ARRAY} all-gather(%p), {GROUPS}, dimensions={{0}}, {BEGUN}
  ROOT %begin = ({ARRAY}, {ARRAY}, u32[]) custom-call(%ag.1), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.1 (p: f32[4], q: f32[4]) -> f32[4] {{
  %p = {ARRAY} parameter(0)
  %q = {ARRAY} parameter(1)
  %ag.2 = {ARRAY} all-gather(%p), {GROUPS}, dimensions={{0}}, {BEGUN}
  %sine = {ARRAY} sine(%q)
  ROOT %both = ({ARRAY}, {ARRAY}, {ARRAY}) tuple(%sine, %p, %ag.2)
}}

%ending (p: f32[4], q: f32[4]) -> f32[4] {{
  %p = {ARRAY} parameter(0)
  %q = {ARRAY} parameter(1)
  %ag.3 = {ARRAY} all-gather(%p), {GROUPS}, dimensions={{0}}, {BEGUN}
  ROOT %end = {ARRAY} custom-call(%p, %q, %ag.3), custom_call_target="AsyncCollectiveDone"
}}
"""
REDUCED = f"""%reduced (p: f32[4]) -> f32[4] {{
  %p = {ARRAY} parameter(0)
  %ar = {ARRAY} all-reduce(%p), {GROUPS}
  ROOT %part = f32[4]{{0}} slice(%ar), slice={{[0:4]}}
}}
"""
BOTH = f"({ARRAY}, {ARRAY}, u32[])"
SPELLINGS = {
    # A square is a ring of four: each link takes (4 - 1) / (2 * 4) of the whole in each direction; an all-gather's is 4 times
    # what each device has.
    "all-gather-start": (
        "",
        [
            f"  %s = {BOTH} all-gather-start(%x0), {GROUPS}, dimensions={{0}}",
            compute("c", "x1"),
            done("d", "s", "all-gather-done"),
        ],
        (1.5, 0.5, 1, 0),
    ),
    "all-reduce-start": (
        "",
        [f"  %s = {ARRAY} all-reduce-start(%x0), {GROUPS}", compute("c", "x1"), done("d", "s", "all-reduce-done")],
        (1, 0, 0.75, 0),
    ),
    "async-start": (
        WRAPPED,
        [
            f"  %s = (({ARRAY}), {ARRAY}, u32[]) async-start(%x0), calls=%wrapped",
            f"  %u = (({ARRAY}), {ARRAY}, u32[]) async-update(%s)",
            compute("c", "x1", 0.125),
            done("d", "u", "async-done"),
        ],
        (0.375, 0.25, 0.125, 0),
    ),
    "reduce-scatter-start": (
        WRAPPED,
        [
            f"  %s = (({ARRAY}), {ARRAY}, u32[]) reduce-scatter-start(%x0), {GROUPS}, calls=%wrapped",
            compute("c", "x1", 0.125),
            done("d", "s", "reduce-scatter-done"),
        ],
        (0.375, 0.25, 0.125, 0),
    ),
    "fusions that hand it on": (
        FUSED,
        [
            f"  %s = {BOTH} fusion(%x0), kind=kCustom, calls=%starting",
            f"  %s.0 = {ARRAY} get-tuple-element(%s), index=0",
            f"  %f = ({ARRAY}, {ARRAY}, {ARRAY}) fusion(%s.0, %x1), kind=kOutput, calls=%async_collective_fusion.1, "
            f'backend_config={{"estimated_cycles":"{CYCLES}"}}',
            f"  %c = {ARRAY} get-tuple-element(%f), index=0",
            f"  %f.1 = {ARRAY} get-tuple-element(%f), index=1",
            f"  %f.2 = {ARRAY} get-tuple-element(%f), index=2",
            f"  %d = {ARRAY} fusion(%f.1, %f.2), kind=kCustom, calls=%ending",
        ],
        (1.5, 0.5, 1, 0),
    ),
    "all-reduce": ("", [f"  %d = {ARRAY} all-reduce(%x0), {GROUPS}", compute("c", "x1")], (1.75, 0.75, 0, 0)),
    "a fusion around it": (
        REDUCED,
        [f"  %d = {ARRAY} fusion(%x0), kind=kCustom, calls=%reduced", compute("c", "x1")],
        (1.75, 0.75, 0, 0),
    ),
    "all-to-all": ("", [f"  %d = {ARRAY} all-to-all(%x0), {GROUPS}", compute("c", "x1")], (1.5, 0.5, 0, 0)),
    "one direction": (
        "",
        [
            f"  %d = {ARRAY} all-reduce(%x0), {GROUPS}, "
            'backend_config={"strategy":"StrategyRing","debug":"\\nStrategyRing{colors:1 phases:1 cores:{4}}"}',
            compute("c", "x1"),
        ],
        (2.5, 1.5, 0, 0),
    ),
    # Axes of two chips have one link either way: both directions pass it.
    "along the axes": (
        "",
        [
            f"  %d = {ARRAY} all-reduce(%x0), replica_groups=[1,4]<=[4], "
            'backend_config={"debug":"\\nUniDirectionNDRingStrategy{colors:4 phases:2 cores:{2 2}}"}',
            compute("c", "x1"),
        ],
        (1.75, 0.75, 0, 0),
    ),
}


@pytest.mark.parametrize("before, lines, expected", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling(before: str, lines: Sequence[str], expected: tuple[float, ...]):
    timeline = laid_out(program(*lines, joined("c", "d"), before=before))
    assert ms(timeline.whole()) == near(*expected)
    assert timeline.whole().transfers == 1
    assert timeline.graph.notes == ()


def test_transfers_over_the_same_links_share_their_bandwidth():
    def both(second: str, fabric: Fabric = SQUARE) -> TimelineTotals:
        lines = (
            permute("s", "x0"),
            permute("t", "x1", second),
            compute("c", "x1"),
            done("d", "s"),
            done("e", "t"),
            joined("d", "e"),
        )
        return laid_out(program(*lines), fabric).whole()

    assert ms(both(AHEAD)) == near(2, 1, 1, 0)
    assert ms(both(BACK)) == near(1, 0, 1, 0)  # the other direction of the same wires
    assert both(BACK).alone_s == pytest.approx(2e-3)
    # A hop's latency takes no bandwidth: what follows is sent meanwhile.
    slow = Fabric(V5E, SQUARE.torus, SQUARE.places, hop_us=500.0)
    assert ms(both(AHEAD, slow)) == near(2.5, 1.5, 1, 0)


def test_a_synchronous_collective_waits_for_the_links_that_are_taken():
    lines = (permute("s", "x0"), f"  %r = {ARRAY} all-reduce(%x1), {GROUPS}", done("d", "s"), joined("r", "d"))
    assert ms(laid_out(program(*lines)).whole()) == near(1.75, 1.75, 0, 0)


LOOP = f"""%body (state: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {{
  %state = (s32[], {ARRAY}, {ARRAY}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %under_way = ({ARRAY}, {ARRAY}, u32[], u32[]) get-tuple-element(%state), index=1
  %w = {ARRAY} get-tuple-element(%state), index=2
{compute("c", "w", 0.5)}
{done("d", "under_way")}
{permute("s", "d")}
  ROOT %after = (s32[], {ARRAY}, {ARRAY}) tuple(%next, %s, %c)
}}

%condition (state.2: (s32[], f32[4], f32[4])) -> pred[] {{
  %state.2 = (s32[], {ARRAY}, {ARRAY}) parameter(0)
  %i.2 = s32[] get-tuple-element(%state.2), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i.2, %n), direction=LT
}}
"""


def test_loops_are_unrolled_and_carry_what_is_under_way():
    lines = (
        "  %zero = s32[] constant(0)",
        permute("first", "x0"),
        f"  %begin = (s32[], {ARRAY}, {ARRAY}) tuple(%zero, %first, %x1)",
        f"  %loop = (s32[], {ARRAY}, {ARRAY}) while(%begin), condition=%condition, body=%body",
        f"  %last = ({ARRAY}, {ARRAY}, u32[], u32[]) get-tuple-element(%loop), index=1",
        done("end", "last"),
    )
    timeline = laid_out(program(*lines, before=LOOP))
    assert ms(timeline.whole()) == near(4, 2.5, 1.5, 0)
    assert timeline.whole().transfers == 4
    unknown = laid_out(program(*lines, before=LOOP.replace("direction=LT", "direction=GT")))
    assert unknown.graph.notes == ("loop: trip count unknown, counted as one iteration",)
    assert unknown.whole().transfers == 2


def test_calls_are_entered_and_the_heaviest_branch_is_taken():
    branch = "%{0} (p: f32[4]) -> f32[4] {{\n  %p = " + ARRAY + " parameter(0)\n{1}\n}}\n\n"
    parts = (
        ("light", compute("a", "p", 1).replace("  %", "  ROOT %")),
        ("heavy", compute("b", "p", 2).replace("  %", "  ROOT %")),
    )
    before = "".join(branch.format(*part) for part in parts)
    lines = (
        f"  %called = {ARRAY} call(%x0), to_apply=%light",
        "  %which = s32[] constant(0)",
        f"  %end = {ARRAY} conditional(%which, %called, %called), branch_computations={{%light, %heavy}}",
    )
    timeline = laid_out(program(*lines, before=before))
    assert ms(timeline.whole()) == near(3, 0, 0, 0)
    assert timeline.graph.notes == ("end: the heaviest of 2 branches counted",)


def test_copies_share_the_memory_and_are_no_communication():
    on_chip = ARRAY.replace("{0}", "{0:T(1024)S(1)}")
    bytes_there = -(-ELEMENTS // 1024) * 1024 * 4
    each = MEMORY_MS * bytes_there / BYTES
    lines = (
        [f"  %s{n} = ({on_chip}, {ARRAY}, u32[]) copy-start(%x{n})" for n in range(2)]
        + [compute("c", "x0", each / 2)]
        + [f"  %d{n} = {on_chip} copy-done(%s{n})" for n in range(2)]
    )
    timeline = laid_out(program(*lines, joined("d0", "d1")))
    assert ms(timeline.whole()) == near(2 * each, 0, 0, 1.5 * each)
    part = f"  %s = (({ARRAY}), f32[1024]{{0:T(1024)S(1)}}, s32[]) slice-start(%x0), slice={{[0:1024]}}"
    (start,) = (
        node for node in read_schedule(program(part, done("d", "s", "slice-done"), inputs=1), V5E).nodes if node.role == "start"
    )
    assert start.transfer == ScheduledTransfer("copy", 4096)
    inside = program(f"  %s = ({on_chip}, {on_chip}, u32[]) copy-start(%c)", done("d", "s", "copy-done"))
    inside = inside.replace("  %s =", f"  %c = {on_chip} copy(%x0)\n  %s =")
    assert [node.transfer.bytes for node in read_schedule(inside, V5E).nodes if node.transfer] == [0]


def test_a_kernels_cycles_are_the_roofline_of_what_it_declares():
    kernel = (
        f'  %k = {ARRAY} custom-call(%x0), custom_call_target="tpu_custom_call", '
        f'backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"197000000000","bytes_accessed":"819000000"}}}}}}'
    )
    timeline = laid_out(program(kernel))
    assert ms(timeline.whole()) == near(1, 0, 0, 0)
    assert timeline.graph.without_estimate == ("k (custom-call)",)
    # Nothing declared: the bytes to and from HBM.
    reverse = laid_out(program(f"  %r = {ARRAY} reverse(%x0), dimensions={{0}}", inputs=1))
    assert ms(reverse.whole()) == near(2 * MEMORY_MS, 0, 0, 0)


def test_what_depends_on_a_layers_inputs_belongs_to_it():
    lines = (
        compute("a", "x0"),
        permute("s", "a"),
        compute("b", "x1", 0.25),
        done("d", "s"),
        f'  %e = {ARRAY} fusion(%d, %b), kind=kLoop, calls=%inner, backend_config={{"estimated_cycles":"{CYCLES}"}}',
    )
    timeline = laid_out(program(*lines))
    sums = timeline.sums()
    assert timeline.layers == (0, 1)
    assert ms(sums[0]) == near(1.75, 0.75, 0.25, 0)
    assert ms(sums[1]) == near(1.25, 0, 0, 0)
    assert sums[0].plus(sums[1]) == timeline.whole()
    assert ms(sums[0].times(2)) == near(3.5, 1.5, 0.5, 0)


def test_the_graph_and_the_trace_are_plain_data():
    timeline = laid_out(program(permute("s", "x0"), compute("c", "x1"), done("d", "s"), joined("c", "d")))
    record = timeline.graph.record()
    assert [node["engine"] for node in record["nodes"]] == ["core", "core", "ici", "core", "core"]
    start = record["nodes"][2]
    ends = record["nodes"][4]
    assert start["transfer"]["pairs"] == ((0, 1), (1, 2), (2, 3), (3, 0))
    assert (ends["start"], ends["needs"]) == (2, (2,))
    events = [event for event in trace([("p", timeline)])["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["tid"], round(event["dur"])) for event in events] == [("c", 0, 1000), ("s", 1, 1000)]


@pytest.mark.parametrize(
    "groups, expected",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("{}", ()),
        ("mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=1,'c'=2], device_ids=([2,2]T(1,0)) {'c'}", ((0, 2), (1, 3))),
        ("mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
    ],
)
def test_groups_of_devices(groups: str, expected: tuple[tuple[int, ...], ...]):
    graph = read_schedule(program(f"  %r = {ARRAY} all-reduce(%x0), replica_groups={groups}, to_apply=%inner", inputs=1), V5E)
    assert [node.transfer.groups for node in graph.nodes if node.transfer] == [expected]


def test_what_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="expected a scheduled program"):
        read_schedule(program(compute("c", "x0")).replace(", is_scheduled=true", ""), V5E)
    with pytest.raises(ValueError, match="expected d to wait for a transfer that was started before it"):
        read_schedule(program(done("d", "x0")), V5E)
    with pytest.raises(ValueError, match="expected devices below 4, the size of the slice, found 5"):
        laid_out(program(permute("s", "x0", "{{0,5}}"), done("d", "s")))
    for groups, ways in (("(0)", "as lists or as an array"), ("mesh[a]", "by the axes of a mesh")):
        with pytest.raises(ValueError, match=f"expected replica groups {ways}"):
            read_schedule(program(f"  %r = {ARRAY} all-reduce(%x0), replica_groups={groups}", inputs=1), V5E)
    unknown = laid_out(program(f"  %r = {ARRAY} collective-broadcast(%x0), {GROUPS}", inputs=1))
    assert unknown.graph.notes == ("r: the time of a collective-broadcast is not modelled and counts as 0",)
    assert unknown.whole() == TimelineTotals()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("run"), st.floats(0, 3)),
        st.tuples(st.sampled_from(["ahead", "back", "all", "sync"]), st.floats(0.01, 3)),
        st.tuples(st.just("done"), st.floats(0, 1)),
    ),
    max_size=25,
)


def drawn(steps: Sequence[tuple[str, float]]) -> ScheduleGraph:
    """A program of such steps: `done` waits for one of those under way; what is left is waited for at the end."""
    ways = {"ahead": ((0, 1), (1, 2), (2, 3), (3, 0)), "back": ((1, 0), (2, 1), (3, 2), (0, 3))}
    nodes: list[Node] = []
    waiting: list[int] = []
    for kind, size in (*steps, *[("done", 0.0)] * len(steps)):
        name = f"n{len(nodes)}"
        if kind == "run":
            nodes.append(Node(name, "fusion", "", "run", cycles=size * CYCLES))
        elif kind == "done":
            if waiting:
                nodes.append(Node(name, "done", "", "done", start=waiting.pop(int(size * (len(waiting) - 1)))))
        else:
            collective = ScheduledTransfer("collective-permute", round(size * BYTES), pairs=ways.get(kind, ()))
            reduce = ScheduledTransfer("all-reduce", round(size * BYTES))
            waiting += [len(nodes)] if kind != "sync" else []
            role = "sync" if kind == "sync" else "start"
            nodes.append(Node(name, kind, "", role, transfer=collective if kind in ways else reduce))
    return ScheduleGraph(tuple(nodes), ())


@given(STEPS)
def test_hidden_and_exposed_are_the_whole(steps: list[tuple[str, float]]):
    timeline = simulate(drawn(steps), SQUARE)
    whole = timeline.whole()
    spans = sorted((span.begin_s, span.end_s) for span in timeline.transfers)
    under_way = 0.0
    until = 0.0
    for begin, end in spans:
        under_way = under_way + max(0.0, end - max(begin, until))
        until = max(until, end)
    waited = sum(span.seconds for span in timeline.core if span.track == "exposed")
    assert whole.communication_s == pytest.approx(under_way)
    assert whole.exposed_s == pytest.approx(waited)
    assert 0 <= whole.exposed_s <= whole.communication_s + 1e-12
    assert whole.communication_s <= whole.alone_s + 1e-12
    assert whole.total_s == pytest.approx(max([0.0, *(span.end_s for span in timeline.core)]))
    assert all(one.end_s <= two.begin_s + 1e-15 for one, two in pairwise(timeline.core))


@given(STEPS, st.data())
def test_less_compute_never_exposes_less(steps: list[tuple[str, float]], data: st.DataObject):
    fewer = [(kind, 0.0 if kind == "run" and data.draw(st.booleans()) else size) for kind, size in steps]
    before, after = (simulate(drawn(each), SQUARE).whole().exposed_s for each in (steps, fewer))
    assert after >= before - 1e-12


@given(STEPS, st.floats(1, 20))
def test_slower_links_never_expose_less(steps: list[tuple[str, float]], factor: float):
    bytes_more = [(kind, size * factor if kind not in ("run", "done") else size) for kind, size in steps]
    before, after = (simulate(drawn(each), SQUARE).whole().exposed_s for each in (steps, bytes_more))
    assert after >= before - 1e-9


@given(STEPS, st.floats(0, 2000))
def test_dearer_starts_and_collectives_in_halves_are_never_faster(steps: list[tuple[str, float]], start_us: float):
    dear = replace(SQUARE, start_us=start_us)
    halves = [each for kind, size in steps for each in ([(kind, size / 2)] * 2 if kind == "sync" else [(kind, size)])]
    plain, dearer, cut = (
        simulate(drawn(each), fabric).whole().total_s for each, fabric in ((steps, SQUARE), (steps, dear), (halves, dear))
    )
    assert plain - 1e-9 <= dearer <= cut + 1e-9
