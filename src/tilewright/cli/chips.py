"""`tilewright chips`: peak rates of chips of several makers, and the least time of a piece of work on each."""

from typing import Any

from tilewright.cli.options import Words
from tilewright.cli.outputs import JsonFile, human_console, write_json
from tilewright.hardware.accelerators import ACCELERATORS, Accelerator, accelerator_of
from tilewright.hardware.neuron import NEURON_CHIPS
from tilewright.hardware.ranged import ranged
from tilewright.metrics.chips import CHIPS
from tilewright.metrics.metric import select_metrics
from tilewright.metrics.tables import FigureTable, print_table

FOOTNOTE = (
    "flop/byte: bfloat16 operations per byte of memory traffic, or per byte over the links in both directions. Above the "
    "first number, the ridge point, compute is the limit. src/tilewright/hardware/ names the sources."
)


def chips(
    *,
    chip: Words = (),
    gflop: float | None = None,
    memory_mb: float | None = None,
    link_mb: float | None = None,
    json_file: JsonFile = None,
) -> None:
    """Compares chips: peak, memory, links and operations per byte; with a piece of work, also its roofline.

    Args:
        chip: names of the chips to show, separated by commas.
        gflop: operations of the work, in 1e9.
        memory_mb: bytes of the work to and from memory, in 1e6.
        link_mb: bytes of the work over links, in 1e6; zero for chips without links.
    """
    console = human_console(json_file)
    for name, value in (("--gflop", gflop), ("--memory-mb", memory_mb), ("--link-mb", link_mb)):
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"expected {name} of 0 or more, found {value:g}")
    shown = [accelerator_of(name) for name in chip] or list(ACCELERATORS.values())
    work = None if gflop is memory_mb is link_mb is None else (1e9 * (gflop or 0), 1e6 * (memory_mb or 0), 1e6 * (link_mb or 0))
    records = [record(one, work) for one in shown]
    last = "least_ms limit" if work else "fabric"
    columns = select_metrics(
        CHIPS,
        f"bf16_tflop_per_s memory_gb memory_gb_per_s links_gb_per_s flops_per_memory_byte flops_per_link_byte {last}",
    )
    print_table(console, FigureTable("", "chip", {"": records}, columns, unknown=""))
    console.print(FOOTNOTE)
    write_json(json_file, {"data": records})


def record(one: Accelerator, work: tuple[float, float, float] | None) -> dict[str, Any]:
    """Returns the figures of a chip, and the roofline of the work."""
    found: dict[str, Any] = {
        "name": one.name,
        "maker": one.maker,
        "cores": one.cores,
        "matrix_units": one.matrix_units,
        "bf16_tflop_per_s": float(one.bf16_tflop_per_s),
        "memory_gb": one.memory_gb,
        "memory_gb_per_s": float(one.memory_gb_per_s),
        "links": one.links,
        "link_gb_per_s_each_way": float(one.link_gb_per_s),
        "links_gb_per_s": one.links_gb_per_s,
        "flops_per_memory_byte": one.flops_per_memory_byte,
        "flops_per_link_byte": one.flops_per_link_byte,
        "fabric": one.fabric,
    }
    if one.name in NEURON_CHIPS:
        chip = NEURON_CHIPS[one.name]
        found["ranges"] = {name: [v.low, float(v), v.high] for name, v in (ranged(chip.core) | ranged(chip)).items()}
    if work is not None:
        roofline = one.roofline(*(work if one.links else (*work[:2], 0.0)))
        found |= {"least_ms": 1e3 * roofline.seconds, "limit": roofline.limit}
        found |= {"compute_ms": 1e3 * roofline.compute_s, "memory_ms": 1e3 * roofline.memory_s}
        found["link_ms"] = None if roofline.link_s is None else 1e3 * roofline.link_s
    return found
