"""Rewards from a server on the loopback interface that answers well, badly, late and only at the second attempt."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from hybridflow.rewards import http
from hybridflow.rewards.http import HttpScorer
from tests.world import free_port


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.asked, self.busy, self.busiest = threading.Lock(), [], 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"


class Handler(BaseHTTPRequestHandler):
    """What it answers depends on the response that it is asked about."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, response = self.server, body["response"]
        with server.lock:
            server.asked.append(body)
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
            seen = sum(one["response"] == response for one in server.asked)
        if response == "slow":
            time.sleep(0.2)
        if response == "hang":
            time.sleep(10)
        with server.lock:
            server.busy -= 1
        if response == "hang up":
            return self.connection.close()
        failing = response == "down" or (response in ("busy once", "down once") and seen == 1)
        status = 429 if failing and response == "busy once" else 503 if failing else 404 if response == "unknown" else 200
        text = {"object": '{"reward": -2, "why": "x"}', "text": '"1.0"', "nan": "NaN", "true": "true", "none": "{}"}
        text |= {"pickle": "\x80\x04K\x01.", "huge": "1" * (2 << 20), "metadata": json.dumps(body["metadata"].get("w"))}
        answer = text.get(response, str(float(response == body["answer"]))).encode("latin-1")
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.02)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def item(response, answer="a", **metadata):
    return ("p", response, answer, metadata)


@pytest.mark.timeout(60)
def test_numbers_objects_and_what_is_no_reward(server):
    responses = ["a", "b", "object", "text", "nan", "true", "none", "pickle", "huge", "unknown", "a"]
    scores = HttpScorer(server.url, concurrency=4, timeout=10, retries=3).score([item(r) for r in responses])
    assert scores.rewards == [1, 0, -2, 0, 0, 0, 0, 0, 0, 0, 1]
    assert (scores.failed, scores.timed_out, scores.unscored) == (7, 0, frozenset(range(3, 10)))
    assert scores.first_failure == "the answer '\"1.0\"' is no reward: ValueError: it is not a number"
    assert len(server.asked) == len(responses)  # what is refused is not asked again
    assert server.asked[0].keys() == {"prompt", "response", "answer", "metadata"}


@pytest.mark.timeout(60)
def test_metadata_of_numpy_and_what_json_cannot_hold(server):
    scorer = HttpScorer(server.url, concurrency=1, timeout=10, retries=0)
    found = scorer.score([item("metadata", w=np.float32(0.5)), item("a", w=object())])
    assert found.rewards == [0.5, 0] and "object is not serialisable" in found.first_failure
    assert scorer.score([]).rewards == []


@pytest.mark.timeout(60)
def test_attempts_are_made_again(server):
    scorer = HttpScorer(server.url, concurrency=8, timeout=2, retries=2)
    responses = ["busy once", "down once", "down", "hang", "hang up", "a"]
    scores = scorer.score([item(r, answer=r if "once" in r else "a") for r in responses])
    assert scores.rewards == [1, 1, 0, 0, 0, 1]
    assert (scores.failed, scores.timed_out) == (2, 1)
    assert "503" in scores.first_failure and "in 3 attempts" in scores.first_failure
    asked = Counter(one["response"] for one in server.asked)
    assert asked == {"busy once": 2, "down once": 2, "down": 3, "hang": 3, "hang up": 3, "a": 1}


@pytest.mark.timeout(60)
def test_no_more_requests_at_a_time_than_asked_for(server):
    HttpScorer(server.url, concurrency=3, timeout=10, retries=0).score([item("slow")] * 9)
    assert server.busiest == 3 and len(server.asked) == 9


@pytest.mark.timeout(60)
def test_nobody_listens():
    scores = HttpScorer(f"http://127.0.0.1:{free_port()}", concurrency=2, timeout=1, retries=0).score([item("a")] * 2)
    assert scores.failed == 2 and "ClientConnectorError" in scores.first_failure
