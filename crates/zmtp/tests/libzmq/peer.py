"""libzmq peer of the tests. First argument: role; second: endpoint.

Publishers send numbered messages until they are killed; message n is [b"topic", n as 8 bytes, b"", n % 7 * 50000 bytes].
All other roles print their results, one per line, and exit.
"""

import sys
import time

import zmq

COUNT = 1000
END = (-1).to_bytes(8, "big", signed=True)


def report(text):
    print(text, flush=True)


def bind(socket, endpoint):
    socket.bind(endpoint)
    report(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def publish(socket):
    n = 0
    while True:
        size = n % 7 * 50000
        socket.send_multipart([b"noise", b"unwanted"])
        socket.send_multipart([b"topic", n.to_bytes(8, "big"), b"", bytes([n % 256]) * size])
        n += 1
        time.sleep(0.001)


def pub_bind(context, endpoint):
    socket = context.socket(zmq.PUB)
    bind(socket, endpoint)
    publish(socket)


def pub_connect(context, endpoint):
    socket = context.socket(zmq.PUB)
    socket.connect(endpoint)
    publish(socket)


def sub(context, endpoint):
    """Receives COUNT messages of a topic in order and reports success."""
    socket = context.socket(zmq.SUB)
    # Cancelled below, to test cancellation.
    socket.subscribe(b"other")
    socket.subscribe(b"top")
    socket.connect(endpoint)
    socket.unsubscribe(b"other")
    for n in range(COUNT):
        parts = socket.recv_multipart()
        assert parts == [b"topic", n.to_bytes(8, "big"), b"", b"x" * (n * 100)], (n, [len(part) for part in parts])
    report(f"received {COUNT}")


def replay(context, endpoint):
    """Replies as vLLM does: one message per batch from the requested number on, then an end marker."""
    socket = context.socket(zmq.ROUTER)
    bind(socket, endpoint)
    while True:
        client, empty, start = socket.recv_multipart()
        assert empty == b"", empty
        for n in range(int.from_bytes(start, "big"), 10):
            socket.send_multipart([client, b"", b"topic", n.to_bytes(8, "big"), b"batch %d" % n])
        socket.send_multipart([client, b"", b"", END, b""])


def request(context, endpoint):
    """Sends requests to a ROUTER: two from a DEALER, which gets all replies, and one from a REQ, which gets the first."""
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    for start in (3, 0):
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        for n in range(start, COUNT):
            parts = dealer.recv_multipart()
            assert parts == [b"", n.to_bytes(8, "big"), b"x" * (n * 100)], (n, [len(part) for part in parts])
        assert dealer.recv_multipart() == [b"", END, b""]
    req = context.socket(zmq.REQ)
    req.connect(endpoint)
    req.send((COUNT - 1).to_bytes(8, "big"))
    assert req.recv_multipart() == [(COUNT - 1).to_bytes(8, "big"), b"x" * ((COUNT - 1) * 100)]
    report("all replies received")


if __name__ == "__main__":
    roles = {"pub_bind": pub_bind, "pub_connect": pub_connect, "sub": sub, "replay": replay, "request": request}
    context = zmq.Context()
    context.linger = 0
    roles[sys.argv[1]](context, sys.argv[2])
