"""Programs: what they are made of, by numbers that can be worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.models import LLAMA_8B, SMALL, Sizes, inferentia, trainium
from tilewright.hardware.tpu import CHIPS
from tilewright.models.decoder import config_from_hf
from tilewright.models.published_configs import MODELS
from tilewright.perfmodel.builder import product_cycles
from tilewright.perfmodel.environment import recommended, variables
from tilewright.perfmodel.inference import SCHEDULES, Work, inference_program
from tilewright.perfmodel.program import NeuronProgram
from tilewright.perfmodel.programs import dflash_program, diffusion_program, gather_reduce_program, hlo_program
from tilewright.perfmodel.schedule import Node, ScheduledTransfer, ScheduleGraph
from tilewright.perfmodel.shapes import Share
from tilewright.perfmodel.simulate import simulate
from tilewright.perfmodel.training import STATE_BYTES, TrainingStep, training_program

GOLDEN = Path(__file__).parents[1] / "golden" / "decoders"


def loaded(program: NeuronProgram) -> float:
    """Bytes of weights, keys and values that come into SBUF."""
    return sum(op.bytes for op in program.ops if op.engine == "dma" and op.name.startswith("load"))


def sums(program: NeuronProgram) -> float:
    return sum(op.collective.bytes for op in program.ops if op.collective is not None and op.collective.kind == "all-reduce")


def test_a_product_s_cycles_are_those_of_its_instructions():
    assert product_cycles(512, 128, 128) == 4 * 128  # rows standing, 128 columns pass, four times
    assert product_cycles(4, 128, 128) == 64  # weights standing, and no fewer than 64
    assert product_cycles(4096, 4096, 128) == 32 * 4096
    assert product_cycles(4096, 4096, 128, fp32=True) == 4 * 32 * 4096


def test_a_share_pads_what_does_not_divide():
    share = Share(LLAMA_8B, 24)
    assert (share.heads, share.kv_heads, share.columns) == (2, 1, 598)
    assert share.notes == ("32 heads over 24 ranks are padded to 48", "14336 MLP columns over 24 ranks are padded to 14352")
    assert Share(LLAMA_8B, 8).notes == ()
    # 8.03e9 parameters less the norms.
    assert Share(LLAMA_8B, 1).model_bytes / 2 == pytest.approx(8.03e9, rel=1e-3)


def test_a_tied_model_has_one_matrix_for_embedding_and_head():
    """Qwen3 4B's 4.02e9 parameters, and what a training step keeps of them."""
    qwen = MODELS["qwen3-4b"]
    step = TrainingStep(positions=512)
    assert Share(qwen, 1).model_bytes / 2 == pytest.approx(4.02e9, rel=1e-3)
    tied, untied = (
        training_program(replace(SMALL, tie_word_embeddings=tied), trainium(), step).resident_bytes for tied in (True, False)
    )
    assert untied - tied == STATE_BYTES * 1024 * 4096 / 4 / 16


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("qwen3-moe", "mixtures of experts"),
        ("qwen3-next-moe", "mixtures of experts and linear attention"),
        ("gemma4-tied", "heads that differ between layers"),
    ],
)
def test_layers_that_are_not_modelled_are_refused(model: str, found: str):
    config = config_from_hf(json.loads((GOLDEN / model / "config.json").read_text()))
    for build in (
        lambda: inference_program(config, inferentia(1), Work("decode", 1, 64), "sync"),
        lambda: training_program(config, trainium(), TrainingStep(positions=64)),
        lambda: dflash_program(config, inferentia(1), 1, 16, 64),
    ):
        with pytest.raises(ValueError, match=f"softmax attention and an MLP \\(no others are modelled\\), found {found}$"):
            build()


@pytest.mark.parametrize("cores", [2, 8])
def test_a_decoding_step_reads_each_weight_once_and_domino_twice_where_sbuf_is_small(cores: int):
    machine = inferentia(cores)
    work = Work("decode", 4, 256)
    share = Share(LLAMA_8B, cores)
    weights = 2 * share.layer_bytes + share.head().bytes + 2 * share.cache_bytes(4, 256)
    found = {name: inference_program(LLAMA_8B, machine, work, name, layers=2) for name in SCHEDULES}
    for name in ("sync", "column", "ring"):
        assert loaded(found[name]) == pytest.approx(weights, rel=0.01)
    again = 2 * (share.mlp_bytes + (share.attention_bytes if cores == 2 else 0))
    assert loaded(found["domino"]) == pytest.approx(weights + again, rel=0.01)
    assert sums(found["domino"]) == sums(found["sync"]) == 2 * 2 * 4 * 4096 * 2
    assert len([op for op in found["domino"].ops if op.engine == "cc"]) == 2 * 4 + 1


@pytest.mark.parametrize("positions", [1024, 1023])
def test_domino_computes_a_prompt_s_scores_once_and_loads_the_keys_of_the_first_half(positions: int):
    """One row: the second micro-batch's queries see all positions up to their own."""
    machine = inferentia(8)
    work = Work("prefill", 1, positions)
    share = Share(LLAMA_8B, 8)
    sync, domino = (inference_program(LLAMA_8B, machine, work, name, layers=1) for name in ("sync", "domino"))
    rel = 1e-9 if positions % 2 == 0 else 0.01  # odd halves do not fill whole tiles
    for name in ("scores", "values", "softmax"):
        cycles = [sum(op.cycles for op in program.ops if op.name == name) for program in (sync, domino)]
        assert cycles[1] == pytest.approx(cycles[0], rel=rel)
    moved = [sum(op.bytes for op in program.ops if op.name == "load keys and values") for program in (sync, domino)]
    assert moved == [0, pytest.approx(share.cache_bytes(1, positions))]


def test_a_ring_s_hops_carry_what_its_collectives_would():
    program = inference_program(LLAMA_8B, inferentia(8), Work("prefill", 2, 1024), "ring", layers=1)
    hops = [op.collective for op in program.ops if op.name == "hop"]
    rows = 2 * 1024 * 4096 * 2
    assert sum(each.bytes for each in hops if each) == pytest.approx(4 * rows * 7 / 8)
    assert len(hops) == 4 * 4, "both ways round, four hops for seven chunks"


def test_a_training_step_gathers_each_weight_twice_and_scatters_it_once():
    program = training_program(SMALL, trainium(), TrainingStep(positions=512))
    by_kind: dict[tuple[str, str], float] = {}
    for op in program.ops:
        if op.collective is not None:
            key = (op.collective.purpose, op.collective.kind)
            by_kind[key] = by_kind.get(key, 0) + op.collective.bytes
    share = Share(SMALL, 4)
    layers = 2 * share.layer_bytes
    assert by_kind["fsdp", "all-gather"] == 2 * layers + share.head().bytes
    assert by_kind["fsdp", "reduce-scatter"] == layers + share.head().bytes
    rows = 512 * 1024 * 2
    assert by_kind["tp", "all-gather"] == rows * (4 + 2 * 4 + 1)
    assert by_kind["tp", "reduce-scatter"] == rows * (4 + 4 + 1)


@pytest.mark.parametrize(("prefetch_distance", "scatter_delay"), [(0, 0), (1, 1), (2, 3), (4, 4)])
@pytest.mark.parametrize("streams", [1, 2])
def test_every_shift_runs(prefetch_distance: int, scatter_delay: int, streams: int):
    result = simulate(
        training_program(
            SMALL, trainium(streams=streams), TrainingStep(prefetch_distance=prefetch_distance, scatter_delay=scatter_delay)
        ),
        trainium(streams=streams),
    )
    assert result.total_s > 0
    assert set(result.dma_bytes) == {"compute", "fsdp", "tp", "norm"}


def test_shifts_beyond_the_model_are_refused():
    with pytest.raises(ValueError, match=r"expected --prefetch-distance of at most 2 layers, found 2\.5"):
        training_program(SMALL, trainium(), TrainingStep(prefetch_distance=5))
    with pytest.raises(ValueError, match="shifts of 0 or more"):
        TrainingStep(scatter_delay=-1)


def test_a_gather_reduce_is_bound_by_descriptors_where_rows_are_small():
    machine = inferentia(2)
    times = [simulate(gather_reduce_program(machine, 4096, 16, features), machine).total_s for features in (64, 2048)]
    rates = [4096 * 16 * 2 * features / seconds for features, seconds in zip((64, 2048), times, strict=True)]
    assert rates[1] > 0.85 * machine.dma_bytes_per_s
    assert rates[0] < 0.5 * machine.dma_bytes_per_s
    with pytest.raises(ValueError, match="from 1, found 0, 16 and 64"):
        gather_reduce_program(machine, 0, 16, 64)


def test_a_dflash_round_takes_longer_than_a_step_and_far_less_than_one_for_each_token():
    machine = inferentia(8)
    step = simulate(inference_program(LLAMA_8B, machine, Work("decode", 1, 1024), "sync"), machine).total_s
    round_ = simulate(dflash_program(LLAMA_8B, machine, 1, 16, 1024), machine).total_s
    assert step < round_ < 2 * step


def test_a_sparse_step_takes_less_than_a_dense_one_but_not_in_proportion():
    model = Sizes(num_layers=4)
    machine = inferentia(8)
    times = {share: simulate(diffusion_program(model, machine, 2, 512, share), machine).total_s for share in (0.25, 1.0)}
    assert 0.25 * times[1.0] < times[0.25] < 0.7 * times[1.0]
    with pytest.raises(ValueError, match="salient share above 0 and at most 1, found 0"):
        diffusion_program(model, machine, 2, 512, 0.0)


def graph() -> ScheduleGraph:
    """A product beside a gather that the next product waits for."""
    sent = ScheduledTransfer("all-gather", 1_000_000, ((0, 1, 2, 3),))
    return ScheduleGraph(
        (
            Node("x", "parameter", "", "input"),
            Node("gather-start", "all-gather-start", "", "start", transfer=sent, needs=(0,)),
            Node("first", "fusion", "", "run", cycles=1.5e5, needs=(0,)),
            Node("gather-done", "all-gather-done", "", "done", start=1, needs=(1,)),
            Node("second", "fusion", "", "run", cycles=1.5e5, needs=(2, 3)),
            Node("copy", "copy-start", "", "start", transfer=ScheduledTransfer("copy", 1000), needs=(4,)),
        ),
        (),
    )


def test_scheduled_hlo_keeps_its_order_and_its_windows():
    machine = inferentia(4)
    chip = CHIPS["v5e"]
    program = hlo_program(graph(), chip, machine)
    result = simulate(program, machine)
    spans = {program.ops[span.op].name: span for span in result.spans}
    compute_s = 1e-4 * 197 / machine.instance.chip.core.bf16_tflop_per_s  # 1.5e5 cycles at 1.5 GHz, by the peaks
    assert spans["first"].end_s == pytest.approx(compute_s, rel=0.01)
    assert spans["gather-start"].begin_s < spans["first"].end_s
    assert spans["second"].begin_s >= max(spans["first"].end_s, spans["gather-start"].end_s)
    assert program.ops[0].collective is not None
    assert program.ops[0].collective.bytes == 4_000_000
    with pytest.raises(ValueError, match="at most the 2 ranks of tp, found 4 in gather-start"):
        hlo_program(graph(), chip, inferentia(2))


def test_the_recommended_environment():
    found = recommended(("fsdp", "tp"))
    assert {one.name: one.value for one in found["jax"]} == {
        "NEURON_FSDP": "1",
        "NEURON_FSDP_CC_MULTISTREAM": "1",
        "NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT": "1",
        "NEURON_FSDP_NUM_LAYER_LATE_RS_SHIFT": "2",
        "NEURON_RT_DBG_DMA_PACKETIZATION_SIZE": "65536",
        "NEURON_RT_DBG_CC_DMA_PACKET_SIZE": "65536,4096",
    }
    assert "NEURON_NXD_FSDP_CC_MULTISTREAM" in {one.name for one in found["nxd"]}
    assert "NEURON_FSDP" not in {one.name for one in found["nxd"]}
    (one_stream,) = (one for one in recommended(("fsdp",))["jax"] if one.name.endswith("CC_DMA_PACKET_SIZE"))
    assert one_stream.value == "4096"
    assert variables(threaded=False, packets=(4096, (65536,))) == []
    with pytest.raises(ValueError, match=r"found 'fdsp' \(did you mean fsdp\?\)"):
        recommended(("fdsp",))
    with pytest.raises(ValueError, match="expected fsdp among the axes"):
        recommended(("tp",))
