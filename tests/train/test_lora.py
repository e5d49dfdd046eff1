"""Training of adapters: their losses and gradients are those of the merged model, whatever holds the base model."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from reference.lora_numpy import config_of, merged
from tilewright.kernels.linear.scaled import ScaledMatrix
from tilewright.kernels.select import PLAIN, training_operations, with_quantised
from tilewright.models import decoder
from tilewright.models.checkpoint import load_decoder, save_params
from tilewright.models.decoder import DecoderConfig
from tilewright.models.lora import Adapter, Adapters, LoraSettings, LowRankPair, operations_for_adapters, target_modules
from tilewright.models.lora_files import merge_adapter, read_adapter, read_adapters, write_adapter
from tilewright.models.params import to_tensors
from tilewright.train.lm import language_model, next_tokens
from tilewright.train.lora import LoraResult, Pairs, adapted, declare_adapter, train_lora
from tilewright.train.step import NOTHING, TrainingPlacement, model_shardings, training_mesh
from tilewright.train.text import Windows
from train.support import HYBRID, TARGET, counting_stream, options, silent, target_params

pytestmark = pytest.mark.usefixtures("quick_compiles")

GOLDEN = Path(__file__).parents[1] / "golden" / "decoders"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
QUICK = ("phi3-partial",)
LORA = LoraSettings(rank=3, alpha=5.0, rslora=True)
COUNTING = counting_stream(600)


def random_pairs(config: DecoderConfig, lora: LoraSettings = LORA) -> Pairs:
    """Returns matrices that change the model much."""
    rng = np.random.default_rng(0)
    specs = declare_adapter(target_modules(decoder.declare(config), lora.targets), lora.rank)

    def draw(spec: Any) -> Any:
        return jnp.asarray(rng.normal(size=spec.shape) / (lora.rank * spec.shape[1]) ** 0.5, jnp.float32)

    return jax.tree.map(draw, specs)


def batch(config: DecoderConfig) -> Any:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, config.vocab_size, (2, 10)).astype(np.int32)
    return next_tokens(jnp.asarray(tokens), jnp.asarray(rng.random((2, 10)) < 0.7))


def adapted_loss(config: DecoderConfig, ops: Any, lora: LoraSettings, pairs: Pairs, base: Any, predicted: Any) -> Any:
    return language_model(config).unbalanced.loss(ops, adapted(config, ops, base, pairs, lora), predicted)[0]


def gradient_of(config: DecoderConfig, ops: Any, pairs: Pairs, base: Any, lora: LoraSettings = LORA) -> Any:
    """Returns the loss with an adapter, and its gradient in the adapter's matrices."""
    loss = partial(adapted_loss, config, ops, lora)
    return jax.jit(jax.value_and_grad(loss))(pairs, base, batch(config))


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_gradients_are_those_of_the_merged_model_in_every_family(name: str):
    """With W + s B A in the model and G the gradient of that matrix, A has the gradient s B.T G, and B has s G A.T."""
    config, base = load_decoder(GOLDEN / name, jnp.float32)
    specs = decoder.declare(config)
    pairs = random_pairs(config)
    scaled = {module: LowRankPair(np.asarray(a), LORA.scale * np.asarray(b)) for module, (a, b) in pairs.items()}
    whole = Adapters((Adapter("merged", LORA.rank, scaled),)).merge(specs, base)
    tensors, together = (dict(to_tensors(specs, params, jnp.float32)) for params in (base, whole))
    for module, (a, b) in scaled.items():
        wanted = tensors[f"{module}.weight"].astype(np.float64) + b.astype(np.float64) @ a
        np.testing.assert_allclose(together[f"{module}.weight"], wanted, atol=1e-5, err_msg=module)

    def merged_loss(params: Any) -> Any:
        return language_model(config).unbalanced.loss(PLAIN, params, batch(config))[0]

    value, gradient = jax.jit(jax.value_and_grad(merged_loss, allow_int=True))(whole)
    by_tensor = dict(to_tensors(specs, gradient, jnp.float32))
    found, got = gradient_of(config, training_operations("float32"), pairs, base)
    np.testing.assert_allclose(found, value, rtol=1e-4)
    for module, (a, b) in pairs.items():
        of_weight = by_tensor[f"{module}.weight"]
        for ours, wanted in ((got[module].a, np.asarray(b).T @ of_weight), (got[module].b, of_weight @ np.asarray(a).T)):
            np.testing.assert_allclose(ours, LORA.scale * wanted, rtol=2e-3, atol=2e-4 * np.abs(wanted).max(), err_msg=module)


@pytest.mark.parametrize("weights", ["int4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "fp8"))])
def test_a_quantised_base_is_the_model_of_its_dequantised_matrices(weights: Any):
    config = replace(TARGET, hidden_size=64, intermediate_size=64, num_layers=1, tie_word_embeddings=False)
    ops = with_quantised(training_operations("float32"), weights)
    base = decoder.prepare(config, ops, target_params(config))

    def is_quantised(leaf: Any) -> bool:
        return isinstance(leaf, ScaledMatrix)

    leaves = jax.tree.leaves(base.layers, is_leaf=is_quantised)
    assert sum(map(is_quantised, leaves)) == 7 * config.num_layers, "all matrices of the layers"
    in_full = jax.tree.map(lambda leaf: ops.restore(leaf) if is_quantised(leaf) else leaf, base, is_leaf=is_quantised)
    pairs = random_pairs(config)
    found, got = gradient_of(config, ops, pairs, base)
    value, wanted = gradient_of(config, PLAIN, pairs, in_full)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    jax.tree.map(lambda ours, plain: np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-6), got, wanted)


def test_weights_that_training_cannot_hold_are_refused():
    assert with_quantised(PLAIN, "dequantised") is PLAIN
    with pytest.raises(ValueError, match="expected frozen weights in dequantised, int8, fp8, int4, found 'auto'"):
        with_quantised(PLAIN, "auto")


def run(
    out: Path,
    config: DecoderConfig = TARGET,
    placement: Any = None,
    lora: LoraSettings = LORA,
    seed_of_base: int = 0,
    **changes: Any,
) -> LoraResult:
    loop = {"steps": 6, "batch_size": 4, "learning_rate": 0.02, "evaluate_every": 3, "save_every": 3}
    chosen = options(**{**loop, "matmul_dtype": "float32", **changes})
    placed = placement or TrainingPlacement()
    base = target_params(config, seed_of_base)
    if placed.mesh is not None:
        base = jax.device_put(base, model_shardings(placed.mesh, decoder.declare(config)))
    length = chosen.sequence_length + 1
    windows = Windows(COUNTING, COUNTING, length, chosen, placed.local_rows(chosen.batch_size))
    return train_lora(config, base, placed.ops(chosen), lora, windows, out, silent(), {}, placed)


def test_an_adapter_learns_and_is_served_as_trained(tmp_path: Path):
    """The held-out loss falls, and that of the written adapter beside the model, by the server's functions, is equal."""
    result = run(tmp_path / "training")
    losses = result.training.curve["held_out_loss"]
    assert losses[-1] < losses[0] < result.base_loss - 0.2

    specs = decoder.declare(TARGET)
    save_params(tmp_path / "model", decoder.config_to_hf(TARGET), specs, target_params(), jnp.float32)
    write_adapter(tmp_path / "adapter", "the model", tmp_path / "model", LORA, result.pairs)
    adapters = read_adapters({"mine": tmp_path / "adapter"})
    assert adapters is not None
    _, base = load_decoder(tmp_path / "model", jnp.float32, ops=operations_for_adapters(PLAIN, adapters))
    params = adapters.apply(PLAIN, specs, base, jnp.float32)
    windows = next(COUNTING.padded_windows(17, 40, 0))
    predicted = next_tokens(*map(jnp.asarray, windows))

    @jax.jit
    def served(number: Any) -> Any:
        numbers = jnp.full(len(windows[0]), number, jnp.int32)
        states = predicted.inputs, predicted.places, decoder.causal_attend
        hidden = decoder.forward(TARGET, PLAIN, params, *states, adapter=numbers).hidden
        total = decoder.cross_entropy(TARGET, PLAIN, params, hidden, predicted.labels, predicted.weights)
        return total / jnp.sum(predicted.counts)

    np.testing.assert_allclose([float(served(n)) for n in (0, 1)], [result.base_loss, losses[-1]], rtol=1e-4)

    merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    fields = config_of([], LORA.rank, LORA.alpha, use_rslora=True)
    wanted = merged(
        load_file(tmp_path / "model/model.safetensors"), fields, load_file(tmp_path / "adapter/adapter_model.safetensors")
    )
    found = load_file(tmp_path / "merged/model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("config", [TARGET, HYBRID], ids=["dense", "experts and linear attention"])
def test_a_mesh_and_checkpoints_of_activations_change_nothing(tmp_path: Path, config: DecoderConfig):
    alone = run(tmp_path / "alone", config)
    for name, placement in (
        ("remat", TrainingPlacement(remat=NOTHING)),
        ("mesh", TrainingPlacement(training_mesh({"fsdp": 4, "tp": 2}, config), None, NOTHING)),
    ):
        other = run(tmp_path / name, config, placement)
        np.testing.assert_allclose(other.training.curve["held_out_loss"], alone.training.curve["held_out_loss"], rtol=1e-3)
        np.testing.assert_allclose(other.base_loss, alone.base_loss, rtol=1e-5)


@pytest.mark.slow
def test_a_run_resumes_with_the_same_base_model_only(tmp_path: Path):
    run(tmp_path / "again", steps=3, schedule="wsd")
    resumed = run(tmp_path / "again", schedule="wsd")
    at_once = run(tmp_path / "at-once", schedule="wsd")
    jax.tree.map(np.testing.assert_array_equal, resumed.pairs, at_once.pairs)
    with pytest.raises(ValueError, match=r"another run \(base: .*; lora.alpha: checkpoint 5.0, now 6.0"):
        run(tmp_path / "again", schedule="wsd", lora=replace(LORA, alpha=6.0), seed_of_base=1)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "c_attn"], "expected target modules among .*down_proj.*, found c_attn$"),
        (["shared_expert_gate"], r"found shared_expert_gate \(adapters do not change routers and experts\)"),
        (["experts.0.down_proj", "*.up_proj"], "found experts.0.down_proj, "),
    ],
)
def test_modules_that_cannot_be_adapted_are_refused_by_name(targets: list[str], expected: str):
    with pytest.raises(ValueError, match=expected):
        target_modules(decoder.declare(HYBRID), targets)


def test_targets_are_ends_of_modules_names():
    specs = decoder.declare(HYBRID)
    assert sorted(target_modules(specs, ["mlp.up_proj", "in_proj_qkvz", "shared_expert.down_proj"])) == [
        "model.layers.0.linear_attn.in_proj_qkvz",
        "model.layers.0.mlp.shared_expert.down_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert not any("experts." in module for module in target_modules(specs, []))
    with pytest.raises(ValueError, match="expected a rank of at least 1, found 0"):
        LoraSettings(rank=0)
    with pytest.raises(ValueError, match="expected an alpha above 0, found -1"):
        LoraSettings(alpha=-1.0)


def test_the_text_half_of_a_multimodal_model_has_pefts_names(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}')
    pairs: Mapping[str, LowRankPair] = {"model.layers.0.mlp.up_proj": LowRankPair(np.ones((2, 6)), np.ones((8, 2)))}
    write_adapter(tmp_path / "out", "base", tmp_path, LoraSettings(rank=2), dict(pairs))
    (name, _) = sorted(load_file(tmp_path / "out" / "adapter_model.safetensors"))
    assert name == "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"
    assert list(read_adapter("mine", tmp_path / "out").pairs) == list(pairs)
