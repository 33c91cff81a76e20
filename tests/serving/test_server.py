"""The server through the openai package and plain HTTP."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from loopback import run_server
from tiny_models import tiny_tokenizer

from qerl.rollout.core import SamplingParams

MESSAGES = [{"role": "user", "content": "Say é!"}]


def test_models_and_health(client: openai.OpenAI, running) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    response = httpx.get(f"{running.url}/health")
    assert response.status_code == 200 and response.json()["status"] == "ok"


def test_a_completion_is_what_the_engine_samples(client: openai.OpenAI, engine) -> None:
    tokenizer = tiny_tokenizer()
    answer = client.completions.create(
        model="tiny", prompt="ab", max_tokens=12, temperature=0.8, seed=5, logprobs=1, extra_body={"ignore_eos": True}
    )
    sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)
    (expected,) = engine.generate([tokenizer.encode("ab")], sampling)
    (choice,) = answer.choices
    assert choice.text == tokenizer.decode(expected[0].token_ids, skip_special_tokens=True)
    assert choice.logprobs.token_logprobs == expected[0].logprobs
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (2, 12, 14)


def test_chat_goes_through_the_template(client: openai.OpenAI, engine) -> None:
    tokenizer = tiny_tokenizer()
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=8, temperature=0, logprobs=True
    )
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert answer.usage.prompt_tokens == len(prompt)
    (expected,) = engine.generate([prompt], SamplingParams(max_tokens=8, temperature=0))
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(expected[0].token_ids, skip_special_tokens=True)
    assert [entry.logprob for entry in choice.logprobs.content] == expected[0].logprobs[: len(choice.logprobs.content)]
    assert choice.finish_reason == expected[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_greedy_choices_are_drawn_once_and_equal(client: openai.OpenAI, running, stream: bool) -> None:
    asked = {"model": "tiny", "prompt": ["one", "two"], "max_tokens": 12, "temperature": 0, "logprobs": 0}
    asked["extra_body"] = {"ignore_eos": True}
    single = client.completions.create(**asked)
    assert len({choice.text for choice in single.choices}) == 2
    before = running.engine.stats.generated_tokens
    if stream:
        texts = [""] * 6
        for chunk in client.completions.create(**asked, n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        whole = client.completions.create(**asked, n=3)
        assert [choice.index for choice in whole.choices] == list(range(6))
        assert whole.choices[4].logprobs == single.choices[1].logprobs
        assert whole.usage.completion_tokens == 6 * 12
        texts = [choice.text for choice in whole.choices]
    assert texts == [choice.text for choice in single.choices for _ in range(3)]
    assert running.engine.stats.generated_tokens - before == 2 * 12


@pytest.mark.parametrize("stop", [None, ["e", "\\"]])
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, stop: list[str] | None) -> None:
    asked = {
        "model": "tiny",
        "prompt": ["one", "two"],
        "max_tokens": 40,
        "seed": 11,
        "n": 2,
        "stop": stop,
        "logprobs": 0,
    }
    whole = client.completions.create(**asked)
    texts, reasons, logprobs, usage = [""] * 4, [None] * 4, [[], [], [], []], None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert reasons[choice.index] is None, "a piece behind the end"
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
            logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert usage == whole.usage
    assert len({choice.text for choice in whole.choices}) == 4


def test_a_chat_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "seed": 2, "temperature": 1.3}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_the_text_and_the_request(client: openai.OpenAI, running) -> None:
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**asked).choices[0].text
    stop = text[5:8]
    at = text.index(stop)
    cut = client.completions.create(**asked, stop=stop)
    assert cut.choices[0].text == text[:at]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < 60
    running.wait_until_idle()


def test_eight_at_once_give_what_each_gives_alone(client: openai.OpenAI, running) -> None:
    def ask(seed: int) -> str:
        return client.completions.create(model="tiny", prompt="go", max_tokens=40, seed=seed).choices[0].text

    alone = [ask(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert together == alone
    running.wait_until_idle()


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    texts = {client.completions.create(model="tiny", prompt="go", max_tokens=20).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def read_until(stream: socket.socket, text: bytes) -> bytes:
    got = b""
    while text not in got:
        part = stream.recv(4096)
        assert part, got
        got += part
    return got


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(running, stream: bool) -> None:
    body = json.dumps(
        {"model": "tiny", "prompt": "x", "max_tokens": 400, "n": 8, "stream": stream, "ignore_eos": True}
    ).encode()
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        if stream:
            read_until(connection, b'"text"')
        deadline = time.monotonic() + 10
        while not running.used_blocks():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        before = running.engine.stats.generated_tokens
    running.wait_until_idle()
    # 8 samples of 400 tokens were asked; far fewer were made.
    assert running.engine.stats.generated_tokens - before < 8 * 350


def test_a_client_that_leaves_before_its_body_is_no_error(running, caplog: pytest.LogCaptureFixture) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.1)
    time.sleep(0.1)
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_of_another_type_is_refused(running) -> None:
    """What a page in a browser can send to a loopback port without being asked."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        body = json.dumps({"model": "tiny", "prompt": "x"})
        response = httpx.post(f"{running.url}/v1/completions", content=body, headers={"content-type": kind})
        assert response.status_code == 415 and "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"model": "other", "prompt": "x"}, 404, "'tiny'"),
        ({"prompt": "x"}, 400, "model is missing"),
        ({"model": "tiny"}, 400, "prompt"),
        ({"model": "tiny", "prompt": ""}, 400, "no tokens"),
        ({"model": "tiny", "prompt": [1, 99999]}, 400, "99999"),
        ({"model": "tiny", "prompt": "x", "temperature": 3}, 400, "temperature"),
        ({"model": "tiny", "prompt": "x", "temperature": 1e-5}, 400, "0.001"),
        ({"model": "tiny", "prompt": "x", "top_p": 0}, 400, "top_p"),
        ({"model": "tiny", "prompt": "x", "n": 0}, 400, "n must be"),
        ({"model": "tiny", "prompt": "x", "n": True}, 400, "n must be"),
        ({"model": "tiny", "prompt": "x", "max_tokens": 1000}, 400, "max_tokens"),
        ({"model": "tiny", "prompt": "x" * 600}, 400, "512 tokens, but 600"),
        ({"model": "tiny", "prompt": "x", "stop": [""]}, 400, "stop"),
        ({"model": "tiny", "prompt": "x", "logprobs": 5}, 400, "logprobs"),
        ({"model": "tiny", "prompt": "x", "echo": True}, 400, "echo"),
        ({"model": "tiny", "prompt": "x", "temprature": 1}, 400, "temprature"),
        ({"model": "tiny", "prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream=true"),
        ([], 400, "JSON object"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_completions(running, body: object, status: int, word: str) -> None:
    response = httpx.post(f"{running.url}/v1/completions", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert word in error["message"] and error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}


def test_bad_chats(running, client: openai.OpenAI) -> None:
    for messages, word in (
        ([], "at least one"),
        ([{"role": "user"}], "must be text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "not text"),
    ):
        with pytest.raises(openai.BadRequestError, match=word):
            client.chat.completions.create(model="tiny", messages=messages)
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=3)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 600}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)


def test_text_parts_and_system_messages(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "é!"}]
    asked = {"model": "tiny", "max_tokens": 5, "temperature": 0}
    joined = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **asked)
    assert joined.usage == client.chat.completions.create(messages=MESSAGES, **asked).usage
    system = [{"role": "system", "content": "brief"}, *MESSAGES]
    assert client.chat.completions.create(messages=system, **asked).usage.prompt_tokens > joined.usage.prompt_tokens


HALF_A_PAIR = b'{"model": "tiny", "prompt": "\\ud83d"}'


@pytest.mark.parametrize("body", [HALF_A_PAIR, b"[" * 100_000], ids=["half-a-pair", "deep"])
def test_text_that_is_no_unicode_and_endless_nesting_are_refused(running, body: bytes) -> None:
    response = httpx.post(f"{running.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]


def test_bodies_and_paths_that_are_none(running) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{running.url}/v1/completions", content=b"{", headers=headers)
    assert response.status_code == 400 and "JSON" in response.json()["error"]["message"]
    response = httpx.get(f"{running.url}/v1/nothing")
    assert response.status_code == 404 and "/v1/nothing" in response.json()["error"]["message"]
    assert httpx.get(f"{running.url}/v1/models/x").json()["error"]["code"] == "model_not_found"


def test_a_key_is_asked_for(tiny_checkpoints: dict[str, Path]) -> None:
    for running in run_server(tiny_checkpoints["llama"], key="s3cret", max_num_seqs=2):
        assert httpx.get(f"{running.url}/health").status_code == 200
        for key in ("wrong", "s3cre"):
            with pytest.raises(openai.AuthenticationError):
                running.client(key).models.list()
        assert running.client("s3cret").completions.create(model="tiny", prompt="x", max_tokens=2).usage


def test_a_failed_step_is_told_and_the_next_request_served(running, client: openai.OpenAI) -> None:
    right = running.engine.runner.forward

    def nan(batch, kv):  # type: ignore[no-untyped-def]
        return right(batch, kv) * float("nan")

    running.engine.runner.forward = nan
    try:
        with pytest.raises(openai.InternalServerError, match="NaN"):
            client.completions.create(model="tiny", prompt="x", max_tokens=3)
    finally:
        running.engine.runner.forward = right
    assert client.completions.create(model="tiny", prompt="x", max_tokens=3).choices[0].text is not None


def test_a_broken_engine_says_so(tiny_checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    for running in run_server(tiny_checkpoints["llama"], max_num_seqs=2):

        def broken(batch, kv):  # type: ignore[no-untyped-def]
            raise RuntimeError("illegal memory access")

        running.engine.runner.forward = broken
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="illegal memory access"):
                running.client().completions.create(model="tiny", prompt="x", max_tokens=3)
        response = httpx.get(f"{running.url}/health")
        assert response.status_code == 503 and response.json()["status"] == "failed"
    assert "the engine failed" in caplog.text


def test_a_small_cache_preempts_and_refuses_what_can_never_fit(tiny_checkpoints: dict[str, Path], client) -> None:
    for running in run_server(tiny_checkpoints["qwen2"], num_blocks=8, max_num_seqs=8):
        small = running.client()
        with pytest.raises(openai.BadRequestError, match="the cache has 8") as caught:
            small.completions.create(model="tiny", prompt="x", max_tokens=200)
        assert caught.value.code == "context_length_exceeded"

        def ask(seed: int, server: openai.OpenAI = small) -> str:
            asked = {"model": "tiny", "prompt": "go", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
            return server.completions.create(seed=seed, **asked).choices[0].text

        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(ask, range(6)))
        assert running.engine.stats.preemptions > 0
        assert together == [ask(seed, client) for seed in range(6)]
        running.wait_until_idle()
