"""Rewards that ask servers: the protocol, and every way in which a real server can misbehave."""

import base64
import io
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mdiff_core import scoring
from mdiff_core.errors import BadSetting, MissingReward, PartlyFailed, RewardFailed, RewardUnavailable
from mdiff_core.options import Choice
from mdiff_core.registry import make
from mdiff_core.settings import RewardTerm, Score
from mdiff_core.types import Prompt
from tests.reward_servers import Answer, Server, brightness, judge, serving, slow
from tests.unit.test_score import sample


def frames(count: int, length: int = 1) -> np.ndarray:
    """Sample i is grey of 10 i, its frames one brighter each."""
    each = [[np.full((8, 8, 3), 10 * i + j, np.uint8) for j in range(length)] for i in range(count)]
    return np.array(each)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", text=f"grey {i}", metadata={"i": i}) for i in range(count)]


def http(server: Server, **options: Any) -> Any:
    return make("reward", Choice(name="http", options={"url": server.url, **options}))


def vlm(server: Server, **options: Any) -> Any:
    return make("reward", Choice(name="vlm_judge", options={"url": f"{server.url}/v1/", "model": "m", **options}))


def test_samples_go_in_batches_and_come_back_in_order() -> None:
    with serving(Server(brightness)) as server:
        found = http(server, batch=4)(frames(10), prompts(10))
    assert found == pytest.approx(np.arange(10) * 10 / 255)
    assert sorted(len(body["samples"]) for body in server.bodies) == [2, 4, 4]
    first = next(body for body in server.bodies if body["samples"][0]["prompt"] == "grey 0")
    assert first["samples"][1]["metadata"] == {"i": 1}


def test_a_group_is_one_request_and_a_video_some_frames() -> None:
    with serving(Server(brightness)) as server:
        reward = http(server, groupwise=True, batch=2, frames=2)
        assert reward.groupwise
        found = reward(frames(5, length=8), prompts(5))
    (body,) = server.bodies
    assert [len(one["frames"]) for one in body["samples"]] == [2] * 5
    assert found == pytest.approx((np.arange(5) * 10 + 4) / 255)


def test_the_token_comes_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret\n")
    (tmp_path / "token").write_text("from-file\n")
    with serving(Server(brightness)) as server:
        http(server, secret="MY_TOKEN")(frames(1), prompts(1))
        http(server, secret=str(tmp_path / "token"), header="X-Api-Key")(frames(1), prompts(1))
        with pytest.raises(BadSetting, match="secret: 'ABSENT' is neither an environment variable nor a file"):
            http(server, secret="ABSENT")(frames(1), prompts(1))
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert server.headers[1]["X-Api-Key"] == "from-file"


def raw(status: int, body: Any, **headers: str) -> Answer:
    return status, headers, body if isinstance(body, bytes) else json.dumps(body).encode()


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (500, RewardUnavailable, "answered 500: 'as told'"),
        (503, RewardUnavailable, "answered 503"),
        (429, RewardUnavailable, "answered 429"),
        (404, RewardFailed, "answered 404: 'as told'; see that address, token and request are right"),
        (401, RewardFailed, "answered 401"),
        (raw(200, b"<html>"), RewardFailed, "what is not JSON: '<html>'"),
        (raw(200, {"score": 1}), RewardFailed, "answered .* to 3 samples"),
        (raw(200, {"scores": [1, 2]}), RewardFailed, "to 3 samples"),
        (raw(200, [1, 2, 3]), RewardFailed, "to 3 samples"),
        (raw(200, {"scores": "good"}), RewardFailed, "to 3 samples"),
        (raw(200, {"scores": [1, None, 3]}), PartlyFailed, "the server's score is None"),
        (raw(200, {"scores": [1, "0.5", 3]}), PartlyFailed, "the server's score is '0.5'"),
        (raw(200, b'{"scores": [1, NaN, 3]}'), PartlyFailed, "the server's score is nan"),
        (raw(200, {"scores": [1, True, 3]}), PartlyFailed, "the server's score is True"),
        (raw(200, {"scores": [1, None, 3], "errors": ["", "no face in it", ""]}), PartlyFailed, "no face in it"),
    ],
)
def test_what_a_wrong_answer_becomes(answer: int | Answer, error: type[RewardFailed], said: str) -> None:
    with serving(Server(brightness, answer)) as server, pytest.raises(RewardFailed, match=said) as caught:
        http(server)(frames(3), prompts(3))
    if error is RewardUnavailable:
        assert isinstance(caught.value, RewardUnavailable)
    elif error is PartlyFailed:
        assert isinstance(caught.value, PartlyFailed)
        assert caught.value.values[::2] == [1, 3] and math.isnan(caught.value.values[1])
    else:
        assert not isinstance(caught.value, RewardUnavailable)


def test_a_server_that_is_down_slow_or_dripping() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    down = Server(brightness)
    down.url = f"http://127.0.0.1:{port}"
    with pytest.raises(RewardUnavailable, match="cannot be reached"):
        http(down)(frames(1), prompts(1))
    for server in (Server(slow(1.0)), Server(brightness, drip_s=0.05)):
        with serving(server), pytest.raises(RewardUnavailable, match=r"did not answer within 0.3 s"):
            started = time.monotonic()
            http(server, timeout_s=0.3)(frames(20), prompts(20))
        assert time.monotonic() - started < 3


def test_some_requests_fail_and_the_others_scores_stand() -> None:
    with serving(Server(brightness, 200, 500, 200)) as server, pytest.raises(PartlyFailed) as caught:
        http(server, batch=2, parallel=1)(frames(6), prompts(6))
    assert [math.isnan(value) for value in caught.value.values] == [False, False, True, True, False, False]


def outcome(server: Server, **settings: Any) -> tuple[list[float], dict[str, float]]:
    """Score ten samples by the server: totals and metrics."""
    term = RewardTerm(name="http", options={"url": server.url, "timeout_s": 0.5, "batch": 5, "parallel": 1})
    chosen = {"rewards": (term,), "backoff_s": 0.01, "batch": 10, **settings}
    sheet = scoring.score([sample(i) for i in range(10)], Score(**chosen))
    return [row.total for row in sheet.scored], dict(sheet.metrics)


GREYS = [i / 255 for i in range(10)]


@pytest.mark.parametrize(
    "script",
    [
        (500,),
        (500, 502),
        (429,),
        (raw(429, b"", **{"Retry-After": "0"}),),
        (raw(200, b"<html>"),),
        (raw(200, {"scores": [None] * 5}),),
    ],
)
def test_a_server_that_recovers_costs_no_score(script: tuple[Any, ...]) -> None:
    with serving(Server(brightness, *script)) as server:
        totals, metrics = outcome(server)
    assert totals == pytest.approx(GREYS)
    assert metrics["reward/http/retries"] == 1 and metrics["reward/missing"] == 0


ALWAYS: dict[str, Callable[[], Server]] = {
    "500": lambda: Server(brightness, *[500] * 99),
    "429": lambda: Server(brightness, *[429] * 99),
    "slow": lambda: Server(slow(2.0)),
    "wrong": lambda: Server(lambda body: {"scores": [0.5]}),
    "text": lambda: Server(lambda body: {"scores": ["0.5"] * len(body["samples"])}),
}


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_server_that_does_not_recover_stops_the_stage_or_masks_and_counts(kind: str) -> None:
    with serving(ALWAYS[kind]()) as server:
        unavailable = kind in ("500", "429", "slow")
        with pytest.raises(RewardUnavailable if unavailable else MissingReward, match=r"sample 'g0/0' and 9 others"):
            outcome(server, attempts=2)
    with serving(ALWAYS[kind]()) as server:
        totals, metrics = outcome(server, attempts=2, on_missing="mask")
    assert all(math.isnan(total) for total in totals), "never a silent 0"
    assert metrics["reward/http/missing"] == metrics["reward/missing"] == 10
    assert metrics["reward/http/retries"] == 1


def test_a_dead_server_ends_the_round_before_all_of_it_was_tried() -> None:
    with serving(Server(brightness, *[500] * 99)) as server:
        with pytest.raises(
            RewardUnavailable, match=r"gave no score in 2 batches in a row, so the round stops early.*500"
        ):
            outcome(server, batch=1, breaker=2, attempts=1, on_missing="mask")
        assert len(server.bodies) == 2


def test_the_judge_sees_question_and_frames_and_marks() -> None:
    with serving(Server(judge)) as server:
        found = vlm(server, frames=2, secret="")(frames(3, length=4), prompts(3))
    assert found == pytest.approx((np.arange(3) * 10 + 2) / 255)
    body = next(b for b in server.bodies if "grey 1" in b["messages"][0]["content"][0]["text"])
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert len(body["messages"][0]["content"]) == 3
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["reason", "score"]
    with serving(Server(judge)) as server:
        vlm(server, schema_enforced=False, question="Mark {prompt} out of {best}.", best=5.0)
        assert "response_format" not in vlm(server, schema_enforced=False).request(frames(1)[0], prompts(1)[0])


def said(text: str) -> Answer:
    return raw(200, {"choices": [{"message": {"content": text}}]})


def test_a_mark_is_found_in_talk_and_bad_ones_are_refused() -> None:
    with serving(Server(judge, said('Sure! ```json\n{"reason": "ok", "score": 7.5}\n``` Bye'))) as server:
        assert vlm(server)(frames(1), prompts(1)) == [0.75]
    for text in (
        "no idea",
        '{"score": "8"}',
        '{"score": 11}',
        '{"score": -1}',
        '{"reason": "x"}',
        '{"score": true}',
        "",
    ):
        with serving(Server(judge, said(text), said('{"score": 10}'))) as server:
            with pytest.raises(PartlyFailed) as caught:
                vlm(server, parallel=1)(frames(2), prompts(2))
            assert caught.value.values[1] == 1.0 and math.isnan(caught.value.values[0]), text


def test_a_judge_that_recovers_is_asked_about_the_failed_sample_only() -> None:
    term = RewardTerm(name="vlm_judge", options={"model": "m", "parallel": 1})
    with serving(Server(judge, 200, 503, said("hm"))) as server:
        term = term.model_copy(update={"options": {**term.options, "url": server.url}})
        sheet = scoring.score([sample(i) for i in range(4)], Score(rewards=(term,), backoff_s=0.0))
    assert [row.total for row in sheet.scored] == pytest.approx(GREYS[:4])
    assert len(server.bodies) == 6 and sheet.metrics["reward/vlm_judge/retries"] == 1


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("http", {"url": "ftp://x"}, "String should match pattern"),
        ("http", {}, "url"),
        ("vlm_judge", {"url": "http://x", "model": "m", "question": "{score}"}, "braces that are neither"),
    ],
)
def test_senseless_settings_are_refused(name: str, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make("reward", Choice(name=name, options=options))


def test_the_server_in_the_docs_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reward-servers.md").read_text()
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(page.partition("```python\n")[2].partition("```")[0], namespace)
    pixels = base64.b64encode(png_bytes(np.full((4, 4, 3), 51, np.uint8))).decode()
    assert namespace["score"]({"frames": [pixels]}) == pytest.approx(0.2)
    http_server = namespace["ThreadingHTTPServer"](("127.0.0.1", 0), namespace["Handler"])
    namespace["Handler"].log_message = lambda *arguments: None
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"http://127.0.0.1:{http_server.server_address[1]}"
        found = make("reward", Choice(name="http", options={"url": url}))(frames(3), prompts(3))
    finally:
        http_server.shutdown()
        thread.join()
        http_server.server_close()
    assert found == pytest.approx(np.arange(3) * 10 / 255)


def png_bytes(frame: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(frame).save(data, "PNG")
    return data.getvalue()
