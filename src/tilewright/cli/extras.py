"""Extras of the package: modules and purpose of each."""

EXTRAS = {
    "train": (("optax", "orbax", "grain", "array_record"), "training"),
    "parquet": (("pyarrow",), "reading Parquet and Arrow files, .zst files and tables of graphs"),
    "tensorboard": (("tensorboardX",), "logging for TensorBoard"),
    "wandb": (("wandb",), "logging to Weights & Biases"),
    "serve": (("fastapi", "uvicorn", "prometheus_client", "pydantic"), "serving"),
    "gguf": (("gguf",), "reading GGUF files"),
    "grammar": (("llguidance",), "structured output"),
    "otel": (("opentelemetry.sdk",), "tracing by OpenTelemetry"),
    "ray": (("ray",), "serving replicas on a cluster (deploy/ray_serve.py)"),
    "graph": (("scipy",), "numbering the nodes of graphs for locality"),
    "metis": (("pymetis",), "partitioning graphs with METIS"),
    "pyg": (("torch_geometric",), "making PyG's Data objects, with a torch of yours; PyG's folders are read without it"),
    "neuron": (("simpy",), "simulating Neuron chips"),
    "tpu": (("libtpu",), "computing on TPUs and compiling for them"),
    "oracle": (("torch", "transformers"), "comparing with transformers"),
}
"""Modules and purpose by name of the extra."""


def installation(extra: str) -> str:
    """Returns the command that installs an extra."""
    return "make oracle, in a checkout" if extra == "oracle" else f"pip install 'tilewright[{extra}]'"
