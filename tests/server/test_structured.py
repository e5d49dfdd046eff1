"""Structured output and tools over the real engine and the demo's model, asked by the openai client."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx2
import jsonschema
import numpy as np
import openai
import pytest
from pydantic import BaseModel, create_model
from safetensors.numpy import load_file

from reference.lora_numpy import config_of, random_adapter, write_adapter
from server.conftest import Real, on_a_port
from tilewright.grammar import token_automaton
from tilewright.grammar.grammar import Grammar
from tilewright.grammar.matcher import Matcher
from tilewright.llm.language_model import LanguageModel, load
from tilewright.models.hub import PACKAGED
from tilewright.runtime.options import EngineOptions
from tilewright.runtime.request import GenerateRequest, RequestOutput
from tilewright.runtime.sampling import Sampling
from tilewright.runtime.shapes import ShapeTable
from tilewright.server.structured import Constrain

TABLE = ShapeTable(batches=(4,), capacities=(512,), chunks=(64, 256), widths=(4,))
PROMPT = "def add(first, second):\n    return"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["red", "green"]}, "age": {"enum": [1, 2]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """With an adapter, which few requests ask for."""
    tensors = load_file(PACKAGED["demo"] / "model.safetensors")
    adapter = random_adapter(np.random.default_rng(0), tensors, ["q_proj"], 2)
    folder = write_adapter(tmp_path_factory.mktemp("tuned"), config_of(["q_proj"], 2, 4), adapter)
    return load("demo", "ngram", block_size=4, table=TABLE, dtype="float32", lora={"tuned": folder})


@pytest.mark.parametrize("grammar", [None, Grammar.regex("[ab]+")])
def test_programs_that_a_call_needs_are_compiled_before_it_is_timed(grammar: Grammar | None):
    """Rounds under masks too, of which there is one kind where others are chosen."""
    team = load("demo", "ngram", table=TABLE, dtype="float32")
    keys = team.start([PROMPT], Sampling(8), grammar=grammar).keys
    rounds = [key.masked for key in keys if key.name == "rounds"]
    assert rounds == ([] if grammar is None else [True])


Plain = list[str]


@pytest.fixture(scope="module")
def plain(lm: LanguageModel) -> Plain:
    """Outputs of plain decoding under a schema, for each temperature."""
    grammar = Grammar.json_schema(SCHEMA)
    samplings = [Sampling(60, temperature, seed=3) for temperature in (0.0, 1.0)]
    return [result.text for result in lm.generate([PROMPT] * 2, samplings, speculative=False, grammar=grammar)]


@pytest.fixture(scope="module")
def real(lm: LanguageModel, plain: Plain) -> Iterator[Real]:
    engine = lm.engine(EngineOptions(table=TABLE, constraints=True))
    engine.warm()
    engine.start()
    with on_a_port(engine, constrain=Constrain(lm, 2.0)) as server:
        yield server
    assert engine.stop(20.0)
    assert lm.compiler is not None
    lm.compiler.sandbox.close()
    stats = engine.stats()
    assert (stats.compilations, stats.running, stats.waiting, stats.pages_used) == (0, 0, 0, 0)


@pytest.fixture
def client(real: Real) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="any", max_retries=0, timeout=60) as made:
        yield made


def schema_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


HELLO: Any = [{"role": "user", "content": PROMPT}]


def test_answers_are_those_of_plain_decoding_under_the_same_masks(real: Real, client: openai.OpenAI, plain: Plain):
    """While other requests, without a grammar, run beside them."""

    def complete(n: int) -> Any:
        more = {"response_format": schema_format(SCHEMA)} if n % 2 else {}
        return client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=60, temperature=float(n // 2 % 2), seed=3, extra_body=more
        )

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(complete, range(8)))
    for n, answer in enumerate(found):
        choice = answer.choices[0]
        if n % 2:
            assert choice.text == plain[n // 2 % 2]
            assert choice.finish_reason == "stop"
            assert answer.metrics["structured_outputs"] == {"masks": "device"}
            jsonschema.validate(json.loads(choice.text), SCHEMA)
        else:
            assert "structured_outputs" not in answer.metrics
            assert choice.text == found[n % 4].choices[0].text
    assert real.engine.stats().automaton_rounds > 0


GRAMMARS = (
    Grammar.json_schema(SCHEMA),
    Grammar.choice(["first of all", "first", 'a "second"']),
    Grammar.regex("(do|don't)( not){0,3} [a-f]+\\."),
    Grammar.json_object(),
)
NESTED = Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stops_do_not_cut_an_answer_that_follows_a_grammar(client: openai.OpenAI, temperature: float):
    """StructuredOutputMetrics of the device and of the host, stop tokens of words and of single characters."""
    for schema in (SCHEMA, {**SCHEMA, "properties": {**SCHEMA["properties"], "age": {"type": "number", "maximum": 9}}}):
        fields: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 150, "temperature": temperature, "seed": 3}
        more = {"response_format": schema_format(schema), "return_token_ids": True}
        tokens = client.completions.create(**fields, extra_body=more).choices[0].token_ids
        stops = sorted({*tokens[:-1]})
        again = client.completions.create(**fields, stop=['"', "name", "}"], extra_body={**more, "stop_token_ids": stops})
        choice = again.choices[0]
        jsonschema.validate(json.loads(choice.text), schema)
        assert choice.finish_reason == "stop"
        assert choice.model_extra.get("stop_reason") is None
        assert choice.token_ids != tokens  # words of the string came in other tokens


def answered(real: Real, ask: GenerateRequest) -> tuple[list[int], set[str]]:
    """The tokens of a request, and where its masks came from."""
    ended = threading.Event()
    tokens = list[int]()

    def listen(update: RequestOutput) -> None:
        tokens.extend(token.token for token in update.tokens)
        if update.end is not None:
            ended.set()

    handle = real.engine.submit(ask, listen)
    assert ended.wait(60)
    return tokens, {*handle.masks}


@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_masks_of_the_device_give_the_answers_of_the_hosts(lm: LanguageModel, real: Real, number: int):
    """Behind thoughts, too, which end in the middle of blocks."""
    found = lm.constrain(GRAMMARS[number])
    prompt = lm.encode(PROMPT)
    host = Matcher(found.matcher, found.eos)
    mark = lm.encode("\n")[0]
    for temperature, one, other, bias in (
        (0.0, found, host, ()),
        (1.0, found, host, ()),
        (1.0, found.after_thinking(mark), host.after_thinking(mark), ((mark, 4.0),)),
    ):
        sampling = Sampling(80, temperature, seed=number, logit_bias=bias)
        asks = [GenerateRequest(prompt, sampling, constraint=each) for each in (one, other)]
        (tokens, device), (want, source) = (answered(real, ask) for ask in asks)
        assert tokens == want
        assert (device, source) == ({"device"}, {"host"})
    at = tokens.index(mark)
    assert at > 0, "it thought"
    state = found.begin()
    state.advance([token for token in tokens[at + 1 :] if token not in lm.target.eos_token_ids])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_that_leave_their_automaton_go_on_under_masks_of_the_host(lm: LanguageModel, real: Real, temperature: float):
    found = lm.constrain(NESTED)
    prompt = lm.encode(PROMPT)
    sampling = Sampling(40, temperature, seed=1, logit_bias=((lm.encode("[")[0], 50.0),))
    asks = [GenerateRequest(prompt, sampling, constraint=each) for each in (found, Matcher(found.matcher, found.eos))]
    assert answered(real, asks[0]) == (answered(real, asks[1])[0], {"device", "host"})


def record(properties: dict[str, Any], needed: list[str] | None = None) -> dict[str, Any]:
    """The schema of an object with these properties alone, of which all are needed unless it is said which."""
    required = [*properties] if needed is None else needed
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


PAIR = record({"of": {"anyOf": [{"$ref": "#/$defs/pair"}, {"type": "null"}]}})


def test_answers_come_back_into_their_automaton(lm: LanguageModel, real: Real, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_automaton, "UNBOUNDED_CLASSES", token_automaton.MOST_ENTRIES)  # the least possible depth
    schema = {"type": "array", "items": {"$ref": "#/$defs/pair"}, "minItems": 3, "maxItems": 3, "$defs": {"pair": PAIR}}
    found = lm.constrain(Grammar.json_schema(schema))
    prompt = lm.encode(PROMPT)
    for seed in (1, 3):
        sampling = Sampling(40, 1.0, seed=seed)
        asks = [GenerateRequest(prompt, sampling, constraint=each) for each in (found, Matcher(found.matcher, found.eos))]
        tokens, masks = answered(real, asks[0])
        assert (tokens, masks) == (answered(real, asks[1])[0], {"device", "host"})
        state = found.begin()
        inside = list[bool]()
        for token in tokens:
            state.advance([token])
            inside.append(state.automaton is not None)
        assert (False, True) in itertools.pairwise(inside), "it left and came back"


def a_schema(rng: np.random.Generator, depth: int = 0) -> dict[str, Any]:
    """A random schema, of an object."""
    if not depth:
        return record({f"key {n}": a_schema(rng, 1) for n in range(int(rng.integers(1, 4)))})
    if depth < 3 and rng.random() < 0.4:
        item = a_schema(rng, depth + 1)
        return {"type": "array", "items": item, "maxItems": 2} if rng.random() < 0.5 else {"anyOf": [item, {"type": "null"}]}
    low = int(rng.integers(-9, 9))
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 6},
        {"type": "integer", "minimum": low, "maximum": low + 20},
        {"type": "boolean"},
        {"enum": ["a", 1, None]},
        {"const": {"a": [1]}},
        {"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"},
        {"type": "number", "minimum": 0, "maximum": 5, "multipleOf": 0.5},
        {"type": "string", "format": "date"},
    ]
    return kinds[int(rng.integers(len(kinds)))]


TREE = record({"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}, "n": {"type": "integer"}}, ["n"])
NOT_OFFERED = ({"not": {}}, {"type": "array", "uniqueItems": True}, {"type": "integer", "minimum": 5, "maximum": 3})


def one_of_many(n: int) -> tuple[dict[str, Any], str]:
    """A random schema, of which some refer to themselves and some ask for what is not offered, and which of these it is."""
    schema = a_schema(np.random.default_rng(n))
    more = {7: {"tree": {"$ref": "#/$defs/tree"}}, 12: {"no": NOT_OFFERED[n // 25 % len(NOT_OFFERED)]}}.get(n % 25, {})
    schema |= {"properties": schema["properties"] | more, "required": [*schema["required"], *more], "$defs": {"tree": TREE}}
    return schema, next(iter(more), "bounded")


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_answers_follow_random_schemas(lm: LanguageModel, client: openai.OpenAI, count: int, pytestconfig: pytest.Config):
    """With `--products` it is more of them."""
    if count > 20 and pytestconfig.getoption("products"):
        count = 500

    def outcome(n: int) -> str:
        """Outcome of a request, and the source of its masks if no other request prevents it."""
        schema, kind = one_of_many(n)
        try:
            answer: Any = client.chat.completions.create(
                model="demo",
                messages=HELLO,
                max_tokens=200,
                temperature=float(n % 2),
                seed=n,
                response_format=schema_format(schema),
            )
        except openai.BadRequestError:
            assert kind == "no", schema
            return "refused"
        choice = answer.choices[0]
        known = lm.constrain(Grammar.json_schema(schema)).automaton is not None
        where = "in the device's loop" if known else "under the host's masks"
        if choice.finish_reason == "length":
            assert kind == "tree", (schema, choice.message.content)
            return f"cut off {where}"
        assert kind != "no", schema
        jsonschema.validate(json.loads(choice.message.content), schema, cls=jsonschema.Draft202012Validator)
        return f"valid {where}"

    with ThreadPoolExecutor(4) as pool:
        found = Counter(pool.map(outcome, range(count)))
    print(f"\n{count} schemas: {dict(found)}")
    assert found["refused"] == len(range(12, count, 25))
    assert min(found["valid in the device's loop"], found["valid under the host's masks"]) > count / 5


@pytest.mark.slow
def test_mixed_requests_compile_nothing(real: Real):
    """Whatever is asked beside whatever else: 300 requests, 8 at a time."""
    chat = {"messages": HELLO, "max_tokens": 24, "temperature": 1}
    tools = {"tools": TOOLS, "tool_choice": "required"}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", chat),
        ("chat/completions", {**chat, "response_format": schema_format(SCHEMA)}),
        ("chat/completions", {**chat, "response_format": {"type": "json_object"}, "model": "tuned"}),
        ("chat/completions", {**chat, **tools, "logprobs": True}),
        ("chat/completions", {**chat, **tools, "tool_choice": "auto", "model": "tuned"}),
        ("completions", {"prompt": PROMPT, "max_tokens": 9, "temperature": 0, "model": "tuned"}),
        ("completions", {"prompt": PROMPT * 9, "n": 2, "presence_penalty": 0.5, "stream": True}),
        ("completions", {"prompt": "1", "structured_outputs": {"grammar": 'start: ("a" | "b") start | "."'}}),
        ("completions", {"prompt": "1", "structured_outputs": {"regex": "[ab]{3,9}"}, "logprobs": 2, "model": "tuned"}),
        ("messages", {**chat, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
        ("responses", {"input": PROMPT, "max_output_tokens": 9, "text": {"format": {"type": "json_object"}}}),
        ("embeddings", {"input": [PROMPT, "a"]}),
    ]

    def status(n: int) -> int:
        route, body = kinds[n % len(kinds)]
        seed = {} if route == "embeddings" else {"seed": n}
        return httpx2.post(f"{real.url}/v1/{route}", json={**body, **seed}, timeout=60).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(status, np.random.default_rng(0).permutation(300).tolist())) == {200}
    stats = real.engine.stats()
    assert stats.compilations == 0
    assert min(stats.automaton_rounds, stats.constrained_rounds) > 0


def test_the_clients_own_helpers_read_answers(client: openai.OpenAI):
    class Short(BaseModel):
        kind: bool
        age: Literal[1, 2] | None

    parsed = client.chat.completions.parse(
        model="demo", messages=HELLO, response_format=Short, max_tokens=120, temperature=1, seed=1
    )
    assert isinstance(parsed.choices[0].message.parsed, Short)
    with client.chat.completions.stream(
        model="demo", messages=HELLO, response_format=Short, max_tokens=120, temperature=1, seed=1
    ) as stream:
        assert stream.until_done().get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


def test_vllms_form(client: openai.OpenAI):
    for structured, right in (
        ({"choice": ["first", "second"]}, ("first", "second")),
        ({"regex": "ab?c"}, ("abc", "ac")),
        ({"grammar": 'start: "x" | "y"'}, ("x", "y")),
        ({"json": {"type": "boolean"}}, ("true", "false")),
        ({"json": '{"const": 1}'}, ("1",)),
    ):
        answer = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=9, logprobs=5, extra_body={"structured_outputs": structured}
        )
        choice = answer.choices[0]
        assert choice.text in right
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert -9999.0 in (choice.logprobs.top_logprobs or [{}])[-1].values(), "what may not come has no probability"


DEEP = {"type": "object", "properties": json.loads('{"items":{"properties":' * 80 + "{}" + "}}" * 80)}
HOSTILE = {"allOf": [{"type": "string", "pattern": f"[a-z]{{0,50}}x{n}"} for n in range(60)]}
"""The matcher goes through the products of all of them."""


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"response_format": schema_format({"type": "integer", "minimum": 5, "maximum": 3})}, "schema", "minimum"),
        ({"response_format": schema_format({"properties": {"a": {"not": {"const": 1}}}})}, "schema", "at properties.a.not"),
        ({"response_format": schema_format(HOSTILE)}, "schema", "takes longer than 2 s"),
        ({"response_format": schema_format(DEEP)}, "schema", "recursion limit"),
        ({"structured_outputs": {"json": {"const": "x" * 2**18}}}, "json", "a grammar of 1 to 262144 characters"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "expected json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "expected 'text'"),
        ({"structured_outputs": {}}, "structured_outputs", "found none of them"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "only one grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "a schema that is JSON"),
        (
            {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
            None,
            "neither ignore_eos nor min_tokens with a constraint",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(client: openai.OpenAI, more: dict[str, Any], param: str | None, message: str):
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.chat.completions.create(model="demo", messages=HELLO, max_tokens=4, extra_body=more)
    found: Any = caught.value.body
    assert found["param"] is None if param is None else found["param"].endswith(param)
    assert time.monotonic() - began < 20  # by the clock of a busy machine; 2 s of a processor


DEEPER = '{"a": ' * 10_000 + "{}" + "}" * 10_000
LONG = f'{{"const": "{"x" * (5 << 20)}"}}'


@pytest.mark.parametrize(("schema", "status"), [(DEEPER, 400), (LONG, 413)], ids=["deep", "long"])
def test_hostile_schemas_are_refused(real: Real, schema: str, status: int):
    body = f'{{"prompt": "a", "structured_outputs": {{"json": {schema}}}}}'
    headers = {"content-type": "application/json"}
    answer = httpx2.post(f"{real.url}/v1/completions", content=body.encode(), headers=headers, timeout=60)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def a_tool(name: str) -> Any:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "unit": {"enum": ["c", "f"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "Tells something.", "parameters": parameters}}


TOOLS = [a_tool("weather"), a_tool("time")]


def test_forced_calls_are_valid_and_stream_as_they_are(client: openai.OpenAI):
    for choice, names in (("required", {"weather", "time"}), ({"type": "function", "function": {"name": "time"}}, {"time"})):
        fields: dict[str, Any] = {"model": "demo", "messages": HELLO, "tools": TOOLS, "tool_choice": choice, "max_tokens": 200}
        fields |= {"temperature": 1.0, "seed": 4, "parallel_tool_calls": False}
        completion: Any = client.chat.completions.create(**fields)
        answer = completion.choices[0]
        assert answer.finish_reason == "tool_calls"
        assert answer.message.content is None
        assert completion.metrics["structured_outputs"] == {"masks": "device"}
        (call,) = answer.message.tool_calls or [None]
        assert call is not None
        assert call.type == "function"
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
        name = ""
        arguments = ""
        ends = []
        # Where a call is forced, a form of texts changes nothing.
        for chunk in client.chat.completions.create(**fields, stream=True, response_format={"type": "json_object"}):
            for part in chunk.choices[0].delta.tool_calls or ():
                assert part.index == 0
                assert part.function is not None
                name += part.function.name or ""
                arguments += part.function.arguments or ""
            ends.append(chunk.choices[0].finish_reason)
        assert (name, arguments) == (call.function.name, call.function.arguments)
        assert ends[-1] == "tool_calls"
        assert not any(ends[:-1])
        goes_on = [*HELLO, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
        after = client.chat.completions.create(model="demo", messages=goes_on, tools=TOOLS, max_tokens=4, temperature=0)
        assert after.choices[0].finish_reason == "length"


@pytest.mark.slow
def test_a_hundred_forced_calls_are_valid(client: openai.OpenAI):
    """Calls of ten pairs of functions, with one function named or with either allowed."""

    def outcome(n: int) -> str:
        schemas = {name: a_schema(np.random.default_rng(2 * (n // 10) + place)) for place, name in enumerate(("look", "find"))}
        tools: Any = [
            {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()
        ]
        named: Any = {"type": "function", "function": {"name": "find"}}
        answer: Any = client.chat.completions.create(
            model="demo",
            messages=HELLO,
            tools=tools,
            tool_choice=named if n % 2 else "required",
            temperature=1.0,
            seed=n,
            parallel_tool_calls=False,
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "find" or n % 2 == 0
        schema = schemas[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema, cls=jsonschema.Draft202012Validator)
        return call.function.name

    with ThreadPoolExecutor(4) as pool:
        found = Counter(pool.map(outcome, range(100)))
    print(f"\n100 calls: {dict(found)}")
    assert min(found["look"], found["find"]) > 10


def test_the_other_apis_have_the_same_grammars(real: Real, client: openai.OpenAI):
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    form = schema_format(SCHEMA)
    chat = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=60, response_format=form, **sampling)
    text = {"format": {"type": "json_schema", **form["json_schema"]}}
    body = {"text": text, **sampling}
    assert client.responses.create(model="demo", input=PROMPT, extra_body=body).output_text == chat.choices[0].message.content
    called = client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=200, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **sampling
    )
    (call,) = called.choices[0].message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    fields: dict[str, Any] = {
        "messages": HELLO,
        "max_tokens": 200,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        **sampling,
        "tools": [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in (tool["function"] for tool in TOOLS)
        ],
    }
    answer = httpx2.post(f"{real.url}/v1/messages", json=fields, timeout=60).json()
    (block,) = answer["content"]
    assert (block["name"], block["input"], answer["stop_reason"]) == (
        call.function.name,
        json.loads(call.function.arguments),
        "tool_use",
    )


def test_the_clients_own_helper_reads_calls(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(create_model("Find", on=(bool, ...)))
    with client.chat.completions.stream(
        model="demo", messages=HELLO, tools=[tool], tool_choice="required", max_tokens=60, parallel_tool_calls=False
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or [None]
    assert call is not None
    assert isinstance(getattr(call.function.parsed_arguments, "on", None), bool)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
    ],
)
def test_tools_that_cannot_be_called_are_refused(client: openai.OpenAI, more: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=HELLO, max_tokens=4, extra_body=more)
    found: Any = caught.value.body
    assert found["param"] == param
