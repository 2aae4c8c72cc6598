"""HTTP as clients speak it, well and badly: whoever can listen gets an answer, and nobody waits for ever."""

import random
import socket
import struct
import time

import pytest

from tests.support.serving import Gated, form, make_image, read_all, request, serving, statuses, toy, until

GET = request("/healthz", method="GET", Content_Length=None)
LAST = request("/healthz", method="GET", Content_Length=None, Connection="close")
FAST = dict(header_time=0.8, body_time=1.0, idle_time=0.8)


@pytest.fixture(scope="module")
def predictor():
    return Gated(toy())


@pytest.fixture(scope="module")
def server(predictor):
    with serving(predictor, body=200_000) as running:
        yield running


@pytest.fixture(scope="module")
def hasty(predictor):
    """A server without much patience."""
    with serving(predictor, body=200_000, connections=8, **FAST) as running:
        yield running


@pytest.fixture(autouse=True)
def still_there(server):
    """Whatever a test has done, the next client is served, and nothing is left inside."""
    yield
    assert server.predict()[0] == 200
    until(lambda: server.app.body_bytes == server.app.batcher.in_progress == 0)


# ---- well ---------------------------------------------------------------------------------------


def test_keep_alive(server):
    with server.dial() as client:
        for _ in range(3):
            client.sendall(request(body=make_image()))
            assert statuses(client.recv(65536)) == [200]


def test_pipelined_requests_are_answered_in_order(server):
    said = server.talk(GET, request(body=make_image()), request("/nowhere", method="GET"), GET + LAST)
    assert statuses(said) == [200, 200, 404, 200, 200]


def test_http_1_0(server):
    said = server.talk(b"GET /healthz HTTP/1.0\r\n\r\n")
    assert statuses(said) == [200]
    assert b"connection: close" in said.lower()


def test_head_is_get_without_body(server):
    said = server.talk(request("/openapi.json", method="HEAD", Connection="close"))
    assert statuses(said) == [200]
    assert said.endswith(b"\r\n\r\n")
    assert int(said.lower().split(b"content-length: ")[1].split(b"\r\n")[0]) > 1000


def test_absolute_form_request_target(server):
    assert statuses(server.talk(request("http://a.b/healthz", method="GET", Connection="close"))) == [200]


def test_nested_url_is_not_absolute_form(server):
    assert server.ask("/healthz?from=http://x/nowhere")[0] == 200


def test_chunked_body(server):
    data = make_image()
    chunks = [
        f"{len(data[i : i + 1000]):x}\r\n".encode() + data[i : i + 1000] + b"\r\n"
        for i in range(0, len(data), 1000)
    ]
    head = request(Content_Length=None, Transfer_Encoding="chunked", Connection="close")
    assert statuses(server.talk(head, *chunks, b"0\r\n\r\n")) == [200]


def test_expect_100_continue(server):
    data = make_image()
    with server.dial() as client:
        client.sendall(request(Content_Length=len(data), Expect="100-continue"))
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(data)
        assert statuses(client.recv(65536)) == [200]
        client.sendall(request(Content_Length=10**9, Expect="100-continue"))
        assert statuses(read_all(client)) == [413]


def test_security_headers_on_every_response(server):
    cases = [
        ("/", "GET"),
        ("/healthz", "GET"),
        ("/nowhere", "GET"),
        ("/v1/predict", "PUT"),
        ("/v1/predict", "POST"),
    ]
    for path, method in cases:
        said = server.talk(request(path, method=method, Connection="close")).decode().lower()
        assert "x-content-type-options: nosniff" in said
        assert "content-security-policy: default-src 'self';" in said
        assert "unsafe" not in said.split("\r\n\r\n")[0]
        assert "referrer-policy: no-referrer" in said
        assert "access-control" not in said
        assert ("cache-control: no-store" in said) == (path != "/")
    assert b"nosniff" in server.talk(b"nonsense\r\n\r\n")


# ---- leaving ------------------------------------------------------------------------------------


def test_half_closed_client_gets_its_response(server):
    assert statuses(server.talk(request(body=make_image()), half=True))[-1] == 200


def test_half_closed_client_gets_a_slow_response(server, predictor):
    """It is asked whether it is still there, with an answer that means nothing."""
    predictor.gate.clear()
    with server.dial() as client:
        client.sendall(request(body=make_image()))
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        time.sleep(0.6)
        predictor.gate.set()
        assert statuses(read_all(client)) == [200]


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_requests_of_disconnected_clients_are_not_run(server, predictor, how):
    """While others wait in the model, clients come, ask and go."""
    before = server.count("vitrail_abandoned_total")
    predictor.gate.clear()
    predictor.batches.clear()
    with server.dial() as first:
        first.sendall(request(body=make_image()))
        until(lambda: predictor.batches == [1])
        leavers = [server.dial() for _ in range(10)]
        for client in leavers:
            client.sendall(request(body=make_image()))
        until(lambda: server.app.batcher.in_progress == 11)
        for client in leavers:
            if how == "resets":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        until(lambda: server.app.batcher.in_progress == 1)
        predictor.gate.set()
        assert statuses(first.recv(65536)) == [200]
    assert server.predict()[0] == 200
    assert predictor.batches == [1, 1]
    assert server.count("vitrail_abandoned_total") == before + 10
    assert server.count("vitrail_queue_depth") == 0


def test_disconnect_during_a_request(server):
    whole = request(body=make_image())
    for cut in [1, 20, 60, len(whole) - 100, len(whole) - 1]:
        with server.dial() as client:
            client.sendall(whole[:cut])
    until(lambda: len(server.app.connections) == 0)


# ---- slowly -------------------------------------------------------------------------------------


def drip(client, data):
    """Byte after byte, until the server has had enough: what it says."""
    client.settimeout(0.05)
    said = b""
    for byte in data:
        try:
            client.sendall(bytes([byte]))
            said += client.recv(65536)
        except TimeoutError:
            continue
        except OSError:
            break
        if said:
            break
    client.settimeout(30)
    return said


def test_header_timeout(hasty):
    with hasty.dial() as client:
        start = time.monotonic()
        assert statuses(drip(client, request(body=b"", Long="x" * 500))) == [408]
        assert time.monotonic() - start < 5
        assert read_all(client) == b""


def test_body_timeout(hasty):
    with hasty.dial() as client:
        client.sendall(request(Content_Length=10_000))
        start = time.monotonic()
        said = drip(client, bytes(500))
        assert statuses(said) == [408]
        assert b"slow_body" in said
        assert time.monotonic() - start < 5


def test_idle_connection_is_closed_without_response(hasty):
    with hasty.dial() as fresh, hasty.dial() as known:
        known.sendall(GET)
        assert statuses(known.recv(65536)) == [200]
        assert fresh.recv(1000) == known.recv(1000) == b""


def test_client_that_does_not_read_is_disconnected(hasty):
    with hasty.dial() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(1)
        try:
            for _ in range(3000):
                client.sendall(request("/openapi.json", method="GET"))
        except OSError:
            pass
        until(lambda: len(hasty.app.connections) == 0)


def test_slow_clients_do_not_block_others(hasty):
    slow = [hasty.dial() for _ in range(7)]
    for client in slow:
        client.sendall(b"POST /v1/pre")
    assert hasty.predict()[0] == 200
    for client in slow:
        assert statuses(read_all(client)) == [408]
        client.close()


def test_connection_limit(hasty):
    until(lambda: len(hasty.app.connections) == 0)
    inside = [hasty.dial() for _ in range(8)]
    until(lambda: len(hasty.app.connections) == 8)
    start = time.monotonic()
    said = hasty.talk(GET)
    assert statuses(said) == [503]
    assert b"retry-after: 1" in said.lower()
    assert time.monotonic() - start < 5
    for client in inside:
        client.close()
    until(lambda: len(hasty.app.connections) == 0)
    assert hasty.predict()[0] == 200


# ---- too much -----------------------------------------------------------------------------------


def test_content_length_above_limit_is_refused_before_the_body(server):
    with server.dial() as client:
        client.sendall(request(Content_Length=200_001))
        said = client.recv(65536)
        assert statuses(said) == [413]
        assert b"200,000" in said
    assert statuses(server.talk(request(Content_Length=10**18))) == [413]


def test_refused_client_that_sends_everything_can_read_the_reason(server):
    said = server.talk(request(body=bytes(200_001)))
    assert statuses(said) == [413]
    assert statuses(server.talk(request(body=bytes(200_000), Connection="close"))) == [415]


def test_chunked_body_limit(server):
    head = request(Content_Length=None, Transfer_Encoding="chunked")
    with server.dial() as client:
        client.sendall(head + b"40000\r\n" + bytes(0x40000))
        assert statuses(client.recv(65536)) == [413]
    said = server.talk(head, b"1\r\nx\r\n" * 20_000)
    assert b"too_many_chunks" in said


def test_limit_of_all_bodies_together(predictor):
    with serving(predictor, body=100_000, bodies=150_000) as running:
        with running.dial() as client:
            client.sendall(request(Content_Length=100_000) + bytes(90_000))
            until(lambda: running.app.body_bytes == 90_000)
            assert statuses(running.talk(request(body=bytes(80_000)))) == [503]
            assert running.predict()[0] == 200
        until(lambda: running.app.body_bytes == 0)
        assert statuses(running.talk(request(body=bytes(80_000), Connection="close"))) == [415]


@pytest.mark.parametrize("at_once", [True, False])
def test_header_size_limit(server, at_once):
    head = request(Long="x" * 20_000, Connection="close")
    said = server.talk(head) if at_once else server.talk(head[:17_000])
    assert statuses(said) == [431]
    assert b"16,384 bytes" in said


# ---- badly --------------------------------------------------------------------------------------

MALFORMED = {
    "nothing": (b"\r\n\r\n\r\n", 400),
    "nonsense": (b"hello\r\n\r\n", 400),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "an empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 400),
    "a host of spaces": (b"GET / HTTP/1.0\r\nHost:   \r\n\r\n", 400),
    "two origins": (b"POST / HTTP/1.1\r\nHost: a\r\nOrigin: a\r\nOrigin: b\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/9": (b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50) + b"\r\n\r\n", 400),
    "a zero byte": (b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a tab": (b"GET\t/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "letters": ("GET /ü HTTP/1.1\r\nHost: a\r\n\r\n".encode(), 400),
    "a bare name": (b"GET / HTTP/1.1\r\nHost: a\r\nfoo\r\n\r\n", 400),
    "space before colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "two lengths": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "a length below 0": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
    "a length of letters": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x10\r\n\r\n", 400),
    "an endless length": (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
    "an unknown encoding": (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    "gzip and chunked": (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "a bad chunk": (request(Content_Length=None, Transfer_Encoding="chunked") + b"zz\r\n", 400),
    "a chunk too long for its size": (
        request(Content_Length=None, Transfer_Encoding="chunked") + b"1\r\nxyz\r\n",
        400,
    ),
    "a cut body": (request(Content_Length=100) + b"x", 400),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 404),
    "OPTIONS": (b"OPTIONS * HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 404),
    "an upgrade": (b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", 200),
}


def test_bad_request_messages(server):
    for name, words in {
        "nonsense": b"not a valid HTTP",
        "an unknown encoding": b"Unknown Transfer-Encoding",
    }.items():
        assert words in server.talk(MALFORMED[name][0], half=True)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests(server, name):
    sent, expected = MALFORMED[name]
    said = server.talk(sent, half=True)
    assert statuses(said)[:1] == [expected]
    assert b"Traceback" not in said
    assert b'File "' not in said


def test_content_length_with_chunked_is_refused(server):
    """Where a proxy before us counts by one and we by the other, requests can be smuggled past it."""
    both = request(Transfer_Encoding="chunked", body=b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n")
    assert statuses(server.talk(both, half=True)) == [400]


def test_two_thousand_mutations(server):
    """No 5xx, no death, whatever becomes of good requests on their way. 501: an encoding nobody knows."""
    chance = random.Random(8)
    body, kind = form(make_image(size=(8, 8)), top=3)
    seeds = [
        GET,
        request(body=make_image(size=(8, 8))),
        request("/v1/predict?top=2", body=body, Content_Type=kind),
        request(Content_Length=None, Transfer_Encoding="chunked") + b"5\r\nhello\r\n0\r\n\r\n",
        request("/v1/explain?layer=0", body=b"x", Origin="http://x"),
    ]
    lines = [
        b"\r\n",
        b"\0",
        b"\xff",
        b"HTTP/1.1",
        b"Content-Length: 7\r\n",
        b"chunked",
        b"--edge",
        b"%00",
        b"\r\n\r\n",
    ]
    for number in range(2000):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 6)):
            place = chance.randrange(len(data))
            match chance.randrange(4):
                case 0:
                    data[place] = chance.randrange(256)
                case 1:
                    data[place:place] = chance.choice(lines)
                case 2:
                    del data[place : place + chance.randint(1, 30)]
                case _:
                    data += data[place : place + 50]
        said = server.talk(bytes(data), half=True)
        assert not [status for status in statuses(said) if status >= 500 and status != 501], bytes(data)
        assert b"Traceback" not in said
        if number % 100 == 0:
            assert server.get("/healthz") == (200, {"live": True})
    assert not [line for line in server.log if line.startswith("internal error")]
