"""`tilewright train lora`: trains a low-rank adapter beside the frozen weights of a model."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from tilewright.cli import train
from tilewright.cli.common import check_decodes, given, keep_programs
from tilewright.cli.options import COMMON, MODEL, WORDS, option_class
from tilewright.cli.outputs import human_console, progress_console
from tilewright.kernels.select import with_quantised
from tilewright.models import decoder, hub, lora_files
from tilewright.models.checkpoint import decoder_config, load_decoder
from tilewright.models.lora import LoraSettings, target_modules
from tilewright.models.params import DTYPES
from tilewright.models.tokenizer import load_tokenizer
from tilewright.parallel.mesh import is_first_process
from tilewright.train.data import end_of_text
from tilewright.train.lm import check_segments
from tilewright.train.lora import train_lora
from tilewright.train.step import Remat, model_shardings

ADAPTER = Group("Adapter", sort_key=2)
MERGED = "merged"
"""Subfolder of the merged model."""


@Parameter(group=train.TRAINING)
@option_class
class AdapterLoopOptions(train.LoopOptions):
    """Options of the training loop, with a learning rate for adapters."""

    learning_rate: Annotated[float, Parameter(group=COMMON)] = 2e-4


def lora(
    model: str,
    *data: Path,
    out: Annotated[Path, Parameter(alias="-o", group=COMMON)],
    rank: Annotated[int, Parameter(alias="-r", group=ADAPTER)] = 16,
    alpha: Annotated[float, Parameter(group=ADAPTER)] = 32.0,
    rslora: Annotated[bool, Parameter(group=ADAPTER)] = False,
    targets: Annotated[tuple[str, ...], WORDS, Parameter(group=ADAPTER)] = (),
    merge: Annotated[bool, Parameter(group=ADAPTER)] = False,
    weights: Annotated[Literal["dequantised", "int8", "int4", "fp8"], Parameter(group=MODEL)] = "dequantised",
    loop: AdapterLoopOptions = AdapterLoopOptions(),
    mesh: Annotated[str | None, Parameter(group=COMMON)] = None,
    remat: Annotated[Remat | None, Parameter(group=train.PERFORMANCE)] = None,
    text: train.TextOption = train.TextSettings(),
    json_file: train.JsonOption = None,
) -> None:
    """Trains a low-rank adapter (LoRA) beside the frozen weights of a model, for `--lora` and PEFT.

    Args:
        model: base model: a folder, a Hugging Face id, or a GGUF file.
        data: text files, JSONL or JSON files of records, or folders of both, as for `train lm`. Prompts and messages of other
            roles than the assistant are not in the loss.
        out: folder for the adapter, in PEFT's format. Its subfolder `training` holds the checkpoint that an interrupted run
            resumes from.
        rank: rank of the adapter's matrices.
        alpha: the adapter counts times alpha / rank.
        rslora: the adapter counts times alpha / sqrt(rank).
        targets: modules to adapt, by Hugging Face's names, such as q_proj,v_proj; by default all linear layers of attention and
            MLP. Routers and experts are never adapted.
        merge: also write the subfolder `merged`, the model with the adapter in its weights.
        weights: format of the frozen matrices. dequantised keeps them in --compute-dtype; int8, int4 and fp8 quantise them, or
            keep those of a file (int4: a GGUF file's blocks), which takes less memory and more time. Embeddings stay in
            --compute-dtype. Experts are quantised by none of these.
        mesh: devices along "fsdp", which shards batches and weights, and "tp", which shards layers, such as fsdp=4,tp=2; XLA's
            partitioner places the collectives. By default one device.
        remat: activations of a layer that are saved for the backward pass, by JAX's policies. By default everything_saveable,
            over a mesh nothing_saveable.
    """
    console = human_console(json_file)
    train.require_data(data)
    train.check_out(out, loop.save, (lora_files.CONFIG, lora_files.WEIGHTS))
    settings = LoraSettings(rank, alpha, rslora, targets)
    options = loop.options()
    if mesh is not None and weights != "dequantised":
        raise ValueError(f"expected one device for --weights {weights}, found --mesh {mesh}")
    keep_programs()
    found = train.TrainingData.read(data, loop, text, train.GLANCE, console)
    folder = hub.resolve(model, console=progress_console(console), check=load_tokenizer)
    check_decodes(folder)
    config = decoder_config(folder)
    target_modules(decoder.declare(config), targets)  # reports unknown modules before the weights are read
    train.check_context(options.sequence_length, config.max_position_embeddings)
    tokenizer = load_tokenizer(folder)
    end = config.eos_token_ids[0] if config.eos_token_ids else end_of_text(tokenizer)
    template = train.chat_template(folder, found.documents, console)
    apart = given(text.segments, config.delta is None)
    check_segments(config, apart)
    sharding = train.ShardingSettings(strategy="explicit" if mesh is None else "auto")
    devices = train.MeshOptions(mesh, sharding, remat)
    placement = devices.placement(config, options)
    batches = found.batches(tokenizer, (end, *config.eos_token_ids), template, loop, text, apart, placement, console)
    ops = with_quantised(placement.ops(options), weights)
    shard = None if placement.mesh is None else partial(model_shardings, placement.mesh)
    quantised = None if weights == "dequantised" else ops
    _, base = load_decoder(folder, DTYPES[options.compute_dtype], progress_console(console), shard, quantised)
    result = train_lora(config, base, ops, settings, batches, out / "training", console, {"weights": weights}, placement)
    lora_files.write_adapter(out, model, folder, settings, result.pairs)
    if merge:
        del base
        lora_files.merge_adapter(folder, out, out / MERGED)
        if is_first_process():
            tokenizer.save(str(out / MERGED / "tokenizer.json"))
        train.copy_tokenizer_files(folder, out / MERGED)
    console.print(f"held-out loss of the base model: {result.base_loss:.3f} nats/token")
    more = {"base_held_out_loss_nats_per_token": result.base_loss, **train.print_read(batches, console)}
    train.report(result.training, out, console, json_file, **more, **devices.metrics())
