"""Chips of several makers and their rooflines."""

from dataclasses import fields

import pytest

from tilewright.hardware.accelerators import ACCELERATORS, accelerator_of, accelerator_of_device
from tilewright.hardware.neuron import CORES, INSTANCES, NEURON_CHIPS, instance_of
from tilewright.hardware.ranged import ranged


def test_a_core_s_peak_is_its_array_s():
    peaks = {name: core.bf16_tflop_per_s for name, core in CORES.items()}
    assert peaks["NeuronCore-v2"] == pytest.approx(91.75, rel=1e-3)  # published as "over 90"
    assert peaks["NeuronCore-v3"] == pytest.approx(79, rel=0.01)
    assert 2 * peaks["NeuronCore-v2"] == pytest.approx(NEURON_CHIPS["Inferentia2"].bf16_tflop_per_s, rel=0.04)


@pytest.mark.parametrize(
    ("name", "chips", "tflop_per_s", "hbm_gib", "hbm_gb_per_s"),
    [
        # Published instances: 12 x 190 TFLOP/s, 9,840 GiB/s; 16 x 190; 10.7 PFLOP/s, 46.4 TB/s; four of those.
        ("inf2.48xlarge", 12, 2280, 384, 9840 * 2**30 / 1e9),
        ("trn1.32xlarge", 16, 3040, 512, 16 * 820 * 2**30 / 1e9),
        ("trn2.48xlarge", 16, 10700, 1536, 46400),
        ("trn2-ultraserver", 64, 42800, 6144, 4 * 46400),
    ],
)
def test_instances_add_up_to_what_is_published(name: str, chips: int, tflop_per_s: float, hbm_gib: float, hbm_gb_per_s: float):
    instance = INSTANCES[name]
    assert instance.chips == chips
    assert chips * instance.chip.bf16_tflop_per_s == pytest.approx(tflop_per_s, rel=0.005)
    assert chips * instance.chip.hbm_gib == hbm_gib
    assert chips * instance.chip.hbm_gb_per_s == pytest.approx(hbm_gb_per_s, rel=0.001)


def test_links_add_up_to_what_is_published():
    """GB/s per chip, both directions."""
    found = {name: ACCELERATORS[name].links_gb_per_s for name in ACCELERATORS}
    assert found["Inferentia2"] == pytest.approx(192 * 2**30 / 1e9)
    assert (found["Trainium1"], found["Trainium2"]) == (384, 1024)
    assert (found["TPU v5e"], found["TPU v5p"], found["TPU v6e"], found["A100"], found["H100"]) == (400, 1200, 800, 600, 900)


def test_the_source_s_comparison_follows_from_the_specs():
    """TPUs and GPUs of that generation do 300 to 600 operations per link byte. Inferentia2's 225 is per memory byte."""
    for name in ("TPU v4", "TPU v5e", "TPU v5p", "A100", "MI250X"):
        assert 300 <= (ACCELERATORS[name].flops_per_link_byte or 0) <= 600
    for name in ("Inferentia2", "Trainium1"):
        assert ACCELERATORS[name].flops_per_memory_byte == pytest.approx(225, rel=0.05)
        assert (ACCELERATORS[name].flops_per_link_byte or 0) > 400, "225 is not per link byte"


def test_the_roofline_is_the_slowest_of_three():
    chip = ACCELERATORS["A100"]
    work = chip.roofline(312e12, 2 * 2039e9, 0.5 * 300e9)
    assert (work.compute_s, work.memory_s, work.link_s) == pytest.approx((1, 2, 0.5))
    assert (work.seconds, work.limit) == (work.memory_s, "memory")
    ridge = chip.flops_per_memory_byte
    assert chip.roofline(1.01 * ridge, 1).limit == "compute"
    assert chip.roofline(0.99 * ridge, 1).limit == "memory"
    with pytest.raises(ValueError, match="CPU has no links; found 5"):
        ACCELERATORS["CPU"].roofline(1, 1, 5)


def test_constants_on_which_sources_disagree_have_ranges():
    core = CORES["NeuronCore-v3"]
    assert ranged(core) == {"dma_gb_per_s": 23}
    rate = ranged(core)["dma_gb_per_s"]
    assert (rate + 0, rate.low, rate.high) == (23, 23, 27.2)
    assert {"hbm_gb_per_s", "link_gb_per_s"} <= set(ranged(NEURON_CHIPS["Trainium2"]))


def test_every_figure_is_positive_but_for_what_a_chip_has_not():
    for one in ACCELERATORS.values():
        zero = {field.name for field in fields(one) if getattr(one, field.name) == 0}
        assert zero == ({"links", "link_gb_per_s"} if one.name == "CPU" else set())


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"found 'trn2\.48xlrge' \(did you mean trn2\.48xlarge"):
        instance_of("trn2.48xlrge")
    with pytest.raises(ValueError, match=r"found 'H10' \(did you mean H100"):
        accelerator_of("H10")
    assert accelerator_of("tpu V5E") is ACCELERATORS["TPU v5e"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU v4", "TPU v4"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("cpu", None),
        ("CPU", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("TPU v3", None),
    ],
)
def test_a_device_is_known_by_its_kind(kind: str, name: str | None):
    found = accelerator_of_device(kind)
    assert (None if found is None else found.name) == name
