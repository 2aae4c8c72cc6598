"""An HTTP/1.1 connection that runs the ASGI application: h11 parses; time limits and disconnects are ours.

Every wait has a timeout, unread data is bounded, and every client that can still receive gets a response.
"""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from http import HTTPStatus
from socket import SO_ERROR, SOL_SOCKET
from typing import TYPE_CHECKING
from urllib.parse import unquote

import h11

from vitrail.serve.messages import (
    MAX_HEAD,
    ClientLeft,
    HTTPError,
    Message,
    busy,
    malformed,
    send_response,
    timed_out,
)

if TYPE_CHECKING:
    from vitrail.serve.app import App

MAX_CHUNKS = 2**14  # chunks of one body
MAX_UNREAD = 2**16  # bytes that may arrive before they are needed
LINGER = 2.0  # seconds for a client that is still sending to read an early error response
GRACE = 0.5  # seconds for requests that are on their way when the server stops
PROBE = 0.5  # seconds between checks whether a half-closed client is still there
CONTINUE = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")


class Reader(asyncio.StreamReader):
    """A stream reader that tells when the client has stopped sending, before all data are read."""

    def __init__(self) -> None:
        super().__init__(MAX_UNREAD)
        self.ended = asyncio.Event()

    def feed_eof(self) -> None:
        super().feed_eof()
        self.ended.set()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        self.ended.set()


def connection_protocol(app: App) -> asyncio.StreamReaderProtocol:
    """A protocol that serves one client."""
    reader = Reader()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        Connection(app, reader, writer)

    return asyncio.StreamReaderProtocol(reader, connected)


class Connection:
    """One client connection."""

    def __init__(self, app: App, reader: Reader, writer: asyncio.StreamWriter) -> None:
        self.app, self.reader, self.writer, self.transport = app, reader, writer, writer.transport
        self.transport.set_write_buffer_limits(0)  # so that `drain` waits until the kernel has everything
        self.parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self.idle = False
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        """Serve requests until either side closes the connection."""
        limit, others = self.app.settings.connections, len(self.app.connections)
        self.app.connections.add(self)
        try:
            if others >= 2 * limit:
                return  # without even an error response
            if others >= limit:
                await self.refuse(busy(f"The server accepts at most {limit} connections"))
            else:
                while await self.serve_one():
                    self.parser.start_next_cycle()
            await self.close()
        except (TimeoutError, OSError, ClientLeft):  # it does not read its response, or has disconnected
            pass
        finally:
            self.app.connections.discard(self)
            self.transport.abort()

    async def serve_one(self) -> bool:
        """Serve one request; return whether another may follow."""
        if not await self.wait_for_request():
            return False
        try:
            scope = await self.read_head()
        except HTTPError as error:
            await self.refuse(error)
        else:
            self.chunks, self.body_read = 0, False
            await self.app(scope, self.receive, self.send)
        return self.parser.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}

    async def refuse(self, error: HTTPError) -> None:
        """Answer a connection that has no valid request."""
        await send_response(error.response(), self.send)
        self.app.record_response(None, error.status, 0.0)

    async def close(self) -> None:
        """Close our side and wait a little for the client to close its own.

        Closing while the client still sends would reset the connection before it has read the response.
        """
        if self.transport.is_closing():
            return
        self.writer.write_eof()
        discarded = 0
        async with asyncio.timeout(LINGER):
            while discarded <= self.app.settings.body and (data := await self.reader.read(MAX_UNREAD)):
                discarded += len(data)

    def close_if_idle(self) -> None:
        if self.idle:
            self.transport.abort()

    # ---- reading ----------------------------------------------------------------------------

    async def next_event(self) -> object:
        """The next event of the parser."""
        await asyncio.sleep(0)  # one client must not block the loop, however much it has sent
        try:
            while (event := self.parser.next_event()) is h11.NEED_DATA:
                await self.read()
        except h11.RemoteProtocolError as error:
            raise malformed(error.error_status_hint) from None
        return event

    async def read(self) -> None:
        """Give the parser the next data, or the end of the stream."""
        try:
            self.parser.receive_data(await self.reader.read(MAX_UNREAD))
        except OSError:
            raise ClientLeft from None

    async def wait_for_request(self) -> bool:
        """Whether a request arrives; a connection without one is closed silently."""
        settings, first = self.app.settings, self.parser.their_http_version is None
        timeout = settings.header_time if first else settings.idle_time
        self.idle = True
        try:
            async with asyncio.timeout(GRACE if self.app.stopping else timeout):
                while not any(self.parser.trailing_data):
                    await self.read()
        except TimeoutError:
            return False
        finally:
            self.idle = False
        return self.parser.trailing_data != (b"", True)  # only the end of the stream

    async def read_head(self) -> Message:
        """The ASGI scope of the next request."""
        timeout = self.app.settings.header_time
        try:
            async with asyncio.timeout(timeout):
                event = await self.next_event()
        except TimeoutError:
            raise timed_out("head", timeout) from None
        if not isinstance(event, h11.Request) or not event.http_version.startswith(b"1."):
            raise malformed(400)
        if sum(len(name) + len(value) for name, value in event.headers) + len(event.target) > MAX_HEAD:
            raise malformed(431)
        target = event.target.decode("ascii")
        if not target.startswith("/") and "://" in target:  # the absolute form, as proxies send it
            target = "/" + target.partition("://")[2].partition("/")[2]
        path, _, query = target.partition("?")
        headers = dict(event.headers)
        if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
            await self.next_event()  # the end of a request without a body
        peer = self.transport.get_extra_info("peername")
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": event.http_version.decode(),
            "method": event.method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path),
            "query_string": query.encode(),
            "headers": list(event.headers),
            "client": peer and peer[:2],
        }

    async def receive(self) -> Message:
        """The next part of the body; after its end, wait until the client disconnects."""
        if self.body_read:
            await self.wait_for_disconnect()
            return {"type": "http.disconnect"}
        if self.parser.they_are_waiting_for_100_continue:
            self.write(CONTINUE)
        event = await self.next_event() if self.parser.their_state is h11.SEND_BODY else None
        if isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            if self.chunks > MAX_CHUNKS:
                message = f"A body may have at most {MAX_CHUNKS:,} chunks; send larger ones."
                raise HTTPError(413, "too_many_chunks", message)
            return {"type": "http.request", "body": bytes(event.data), "more_body": True}
        self.body_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def wait_for_disconnect(self) -> None:
        """Find out whether a client that has closed its sending side still waits for its response.

        A disconnected client looks the same until something is sent to it. 100 Continue is harmless, since
        clients skip it; if the client is gone, its system replies with a reset.
        """
        await self.reader.ended.wait()
        await asyncio.sleep(0 if self.reader.exception() else PROBE)
        if self.parser.their_http_version == b"1.1":
            self.write(CONTINUE)
        socket = self.transport.get_extra_info("socket")
        while not self.transport.is_closing() and not socket.getsockopt(SOL_SOCKET, SO_ERROR):
            await asyncio.sleep(PROBE)
        self.transport.abort()

    # ---- writing ----------------------------------------------------------------------------

    def write(self, *events: h11.Event) -> None:
        self.writer.write(b"".join(self.parser.send(event) or b"" for event in events))

    async def send(self, message: Message) -> None:
        """Send the response; the app gives its head first, and then its whole body."""
        if message["type"] == "http.response.start":
            self.start = message
            return
        headers = [(b"date", formatdate(usegmt=True).encode()), *self.start["headers"]]
        if self.app.stopping or self.parser.their_state is not h11.DONE:
            headers.append((b"connection", b"close"))  # no further request, or the body was not read
        status = self.start["status"]
        head = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
        self.write(head, h11.Data(data=message["body"]), h11.EndOfMessage())
        async with asyncio.timeout(self.app.settings.body_time):
            await self.writer.drain()
