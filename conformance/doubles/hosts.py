"""Two hosts on this machine: network namespaces with addresses and names of their own, joined by a link of our making.

The link is a pair of TUN devices whose packets this process carries: with delay, with loss, or, while it is cut, not at
all and without an answer, as a broken switch would. The kernel's own ``netem`` is missing in small kernels. Needs root
and Linux.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 60000
"""Few packets: each passes through Python."""
DEVICE = "link0"
NAMES = Path("/etc/netns")
"""``ip netns exec`` shows a command the files of its namespace's folder here in place of those of /etc."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces and TUN devices."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip") or not Path("/dev/net/tun").exists():
        return False
    return not subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode


class Link:
    """The packets between two TUN devices."""

    def __init__(self, names: Sequence[str], *, delay_s: float, loss: float) -> None:
        """``delay_s``: one way. ``loss``: share of packets, drawn with a fixed seed."""
        self.delay_s, self.loss = delay_s, loss
        self.num_lost, self.num_cut = 0, 0
        """Packets that did not arrive: by chance; while the link was cut."""
        self._is_cut, self._is_closed = False, False
        self._random, self._waiting = random.Random(1), list[tuple[float, int, int, bytes]]()
        self._ends = [_open_tun(name) for name in names]
        self._thread = threading.Thread(target=self._carry, daemon=True, name="link")

    def start(self) -> None:
        """Begin to carry packets; the devices are up, without which they cannot be read."""
        self._thread.start()

    def cut(self) -> None:
        """Lose all packets from now on, without an error to anybody."""
        self._is_cut = True

    def mend(self) -> None:
        """Carry packets again."""
        self._is_cut = False

    def close(self) -> None:
        """End; the devices go with it."""
        self._is_closed = True
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _carry(self) -> None:
        for number in range(1 << 62):
            if self._is_closed:
                return
            ready, _, _ = select.select(self._ends, [], [], self._wait_s())
            for end in ready:
                self._take(end, number)
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._waiting)
                if self._is_cut:
                    self.num_cut += 1
                else:
                    os.write(to, packet)

    def _take(self, end: int, number: int) -> None:
        packet, to = os.read(end, MTU + 64), self._ends[end == self._ends[0]]
        if self._random.random() < self.loss:
            self.num_lost += 1
        else:
            heapq.heappush(self._waiting, (time.monotonic() + self.delay_s, number, to, packet))

    def _wait_s(self) -> float:
        return max(0.0, min(0.1, self._waiting[0][0] - time.monotonic())) if self._waiting else 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One of the two."""

    name: str
    namespace: str
    address: str
    address_v6: str

    def command(self, *words: str) -> list[str]:
        """A command on this host, with its network, its name, and the names that it knows."""
        named = ("unshare", "--uts", "sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"', self.name)
        return ["ip", "netns", "exec", self.namespace, *named, *words]

    def sent_bytes(self) -> int:
        """What has left this host on the link, headers included."""
        shown = subprocess.run(
            ["ip", "-n", self.namespace, "-json", "-stats", "link", "show", DEVICE], check=True, capture_output=True
        )
        return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Sockets that this thread opens inside, and threads that it starts inside, are on this host."""
        with open("/proc/thread-self/ns/net") as before:
            enter(self.namespace)
            try:
                yield
            finally:
                _check(_LIBC.setns(before.fileno(), CLONE_NEWNET))


@contextmanager
def two_hosts(*, delay_s: float, loss: float) -> Iterator[tuple[Host, Host, Link]]:
    """``host-a`` and ``host-b``, which know each other by name, and the link between them."""
    hosts = list[Host]()
    with ExitStack() as stack:
        for number, letter in enumerate("ab", start=1):
            namespace = f"rollmatch-{os.getpid()}-{letter}"
            addresses = {"address": f"10.77.0.{number}", "address_v6": f"fd00:77::{number}"}
            hosts.append(Host(name=f"host-{letter}", namespace=namespace, **addresses))
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "delete", namespace)
            (NAMES / namespace).mkdir(parents=True)
            stack.callback(shutil.rmtree, NAMES / namespace)
        names = "".join(f"{host.address} {host.name}\n" for host in hosts) + "127.0.0.1 localhost\n"
        devices = [f"rm{os.getpid()}{letter}" for letter in "ab"]
        link = Link(devices, delay_s=delay_s, loss=loss)
        for host, device in zip(hosts, devices, strict=True):
            (NAMES / host.namespace / "hosts").write_text(names)
            _ip("link", "set", device, "netns", host.namespace, "name", DEVICE)
            inside = ("-n", host.namespace)
            _ip(*inside, "link", "set", "lo", "up")
            _ip(*inside, "link", "set", DEVICE, "up", "mtu", str(MTU))
            _ip(*inside, "address", "add", f"{host.address}/24", "dev", DEVICE)
            _ip(*inside, "address", "add", f"{host.address_v6}/64", "dev", DEVICE, "nodad")
        link.start()
        stack.callback(link.close)
        yield hosts[0], hosts[1], link


def enter(namespace: str) -> None:
    """Move this thread into a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        _check(_LIBC.setns(file.fileno(), CLONE_NEWNET))


def _open_tun(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return end


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
