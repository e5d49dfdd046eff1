"""Sizes for tests, tuning and benchmarks: every linear layer of some real models, by name."""

from dataclasses import dataclass

LAYERS = ("q", "k", "v", "o", "gate_up", "down", "head")
"""Names of a decoder's linear layers; `gate_up` is the gated pair, computed in one call."""


@dataclass(frozen=True)
class LinearCase:
    """A linear layer of a model.

    Attributes:
        model: key in `CASES`.
        layer: a name of `LAYERS`.
        inputs, outputs: shape of the weight; a `gated` layer has two weights.
    """

    model: str
    layer: str
    inputs: int
    outputs: int

    @property
    def gated(self) -> bool:
        return self.layer == "gate_up"

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * (2 if self.gated else 1)


def model_cases(model: str, **sizes: tuple[int, int]) -> dict[str, LinearCase]:
    assert tuple(sizes) == LAYERS
    return {layer: LinearCase(model, layer, *size) for layer, size in sizes.items()}


CASES: dict[str, dict[str, LinearCase]] = {
    # assets/demo/target/config.json: hidden 128, 4 heads and 2 key-value heads of 32.
    "demo": model_cases(
        "demo", q=(128, 128), k=(128, 64), v=(128, 64), o=(128, 128), gate_up=(128, 256), down=(256, 128), head=(128, 4096)
    ),
    # huggingface.co/Qwen/Qwen3-0.6B, config.json: hidden 1024, 16 heads and 8 key-value heads of 128.
    "qwen3-0.6b": model_cases(
        "qwen3-0.6b",
        q=(1024, 2048),
        k=(1024, 1024),
        v=(1024, 1024),
        o=(2048, 1024),
        gate_up=(1024, 3072),
        down=(3072, 1024),
        head=(1024, 151936),
    ),
    # huggingface.co/Qwen/Qwen3-1.7B, config.json: hidden 2048, 16 heads and 8 key-value heads of 128.
    "qwen3-1.7b": model_cases(
        "qwen3-1.7b",
        q=(2048, 2048),
        k=(2048, 1024),
        v=(2048, 1024),
        o=(2048, 2048),
        gate_up=(2048, 6144),
        down=(6144, 2048),
        head=(2048, 151936),
    ),
    # huggingface.co/Qwen/Qwen3-4B, config.json: hidden 2560, 32 heads and 8 key-value heads of 128.
    "qwen3-4b": model_cases(
        "qwen3-4b",
        q=(2560, 4096),
        k=(2560, 1024),
        v=(2560, 1024),
        o=(4096, 2560),
        gate_up=(2560, 9728),
        down=(9728, 2560),
        head=(2560, 151936),
    ),
}
"""Layers of each model by name. Heads tied to the embedding are included."""


def named(models: tuple[str, ...], layers: tuple[str, ...]) -> list[LinearCase]:
    """Returns the cases of some models and layers, in the given order.

    Raises:
        ValueError: an unknown name, or no name.
    """
    for option, given, known in (("model", models, tuple(CASES)), ("layer", layers, LAYERS)):
        if not given or not set(given) <= set(known):
            unknown = ", ".join(repr(name) for name in given if name not in known) or "none"
            raise ValueError(f"expected each {option} to be one of {', '.join(known)}, found {unknown}")
    return [CASES[model][layer] for model in dict.fromkeys(models) for layer in dict.fromkeys(layers)]
