"""Bare Python sockets to and from a Redis server: the least that a tier has to do, with no checks."""

import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from baselines.redis_lanes import Lane, connect

Send: TypeAlias = Callable[[socket.socket, list[bytes | memoryview]], None]


def send_all(link: socket.socket, parts: list[bytes | memoryview]) -> None:
    """Send the parts with one call."""
    assert link.sendmsg(parts) == sum(map(len, parts))


def plain_sockets(
    links: Sequence[socket.socket],
    rows: memoryview,
    nbytes: int,
    count: int,
    *,
    window: int = 512 << 10,
    send: Send = send_all,
) -> Lane:
    """Move the rows, each connection its share: a window of them with one call, then the replies."""
    most, share = max(1, window // nbytes), -(-count // len(links))
    views = [rows[number * nbytes : (number + 1) * nbytes] for number in range(count)]
    keys = [b"bare:%06d" % number for number in range(count)]

    def write(link: socket.socket, numbers: Sequence[int]) -> None:
        parts: list[bytes | memoryview] = []
        for number in numbers:
            parts += [b"*3\r\n$3\r\nSET\r\n$11\r\n%b\r\n$%d\r\n" % (keys[number], nbytes), views[number], b"\r\n"]
        send(link, parts)
        replies = link.recv(5 * len(numbers), socket.MSG_WAITALL)
        assert replies == b"+OK\r\n" * len(numbers), replies

    def read(link: socket.socket, numbers: Sequence[int]) -> None:
        link.sendall(b"".join([b"*2\r\n$3\r\nGET\r\n$11\r\n%b\r\n" % keys[number] for number in numbers]))
        around = memoryview(bytearray(len(b"$%d\r\n" % nbytes) + 2))
        for number in numbers:
            buffers, left = [around[2:], views[number], around[:2]], nbytes + len(around)
            while left:
                moved = link.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
                assert moved, "the server is gone"
                left -= moved
                buffers = behind(buffers, moved)

    def move_share(index: int, way: str) -> None:
        work, mine = {"write": write, "read": read}[way], range(count)[index * share : (index + 1) * share]
        for at in range(0, len(mine), most):
            work(links[index], mine[at : at + most])

    def move(way: str) -> None:
        threads = [threading.Thread(target=move_share, args=(index, way)) for index in range(len(links))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return move


def behind(buffers: Sequence[Any], moved: int) -> list[Any]:
    """Return what is left of the buffers after so many bytes."""
    rest = list(buffers)
    while rest and moved >= len(rest[0]):
        moved -= len(rest.pop(0))
    return [memoryview(rest[0])[moved:], *rest[1:]] if rest else []


def tls_socket(port: int, tls: Any, rows: memoryview, nbytes: int, count: int) -> Lane:
    """Do the least that a Python TLS socket can do: one connection, four requests ahead, no check of anything."""
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(tls.cert, tls.key)
    connected = context.wrap_socket(connect(port), server_hostname="127.0.0.1")
    connected.sendall(b"*3\r\n$4\r\nAUTH\r\n$5\r\nadmin\r\n$6\r\nsecret\r\n")
    assert connected.recv(64) == b"+OK\r\n"
    head = memoryview(bytearray(b"$%d\r\n" % nbytes))
    tail = memoryview(bytearray(2))

    def fill_all(view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += connected.recv_into(view[done:])

    def move(way: str) -> None:
        for number in range(count + 4):
            if number < count:
                key = b"tls:%06d" % number
                if way == "write":
                    connected.sendall(b"*3\r\n$3\r\nSET\r\n$10\r\n%b\r\n$%d\r\n" % (key, nbytes))
                    connected.sendall(rows[number * nbytes : (number + 1) * nbytes])
                    connected.sendall(b"\r\n")
                else:
                    connected.sendall(b"*2\r\n$3\r\nGET\r\n$10\r\n%b\r\n" % key)
            if number >= 4 and way == "write":
                fill_all(head[:5])
            elif number >= 4:
                fill_all(head)
                fill_all(rows[(number - 4) * nbytes : (number - 3) * nbytes])
                fill_all(tail)

    def move_and_mend(way: str) -> None:
        move(way)
        head[:] = b"$%d\r\n" % nbytes

    return move_and_mend
