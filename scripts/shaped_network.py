"""Ranks in network namespaces, joined by a switch whose every port is shaped to one rate, each way.

    with ShapedNetwork(ranks=3, rate="100mbit") as network:
        processes = [network.start(rank, [sys.executable, "worker.py"]) for rank in range(3)]

Linux, root, and the tools `ip` and `tc` are needed: `why_not()` says what is missing. There is no delay or loss, only
rate: token buckets (tbf), with a queue long enough not to drop TCP's packets.
"""

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

from lowbit.comm.cost import parse_rate


def shape(rate: str) -> list[str]:
    """Arguments of tc for a rate like 100mbit.

    The bucket holds what passes in 5 ms: less would not reach the rate, more would let short messages through unshaped.
    """
    burst = int(min(256_000, max(32_000, parse_rate(rate) / 8 * 0.005)))
    return ["root", "tbf", "burst", str(burst), "latency", "100ms", "rate", rate]


def why_not() -> str | None:
    """The reason why namespaces cannot be used here, or None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the tool {tool} is not installed (package iproute2)"
    probe = f"lowbit-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not allowed: {made.stderr.strip() or 'ip netns add failed'}"
    try:
        command = ["tc", "qdisc", "add", "dev", "lo", *shape("1gbit")]
        shaped = subprocess.run(["ip", "netns", "exec", probe, *command], capture_output=True, text=True)
        return f"links cannot be shaped: {shaped.stderr.strip()}" if shaped.returncode else None
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=True)


class ShapedNetwork:
    """`ranks` namespaces with addresses 10.99.0.1, 10.99.0.2, ..."""

    def __init__(self, ranks: int, rate: str) -> None:
        self.ranks, self.rate = ranks, rate
        self.prefix = f"lb{os.getpid()}"
        self.switch = f"{self.prefix}s"

    def name(self, rank: int) -> str:
        return f"{self.prefix}n{rank}"

    def address(self, rank: int) -> str:
        return f"10.99.0.{rank + 1}"

    def __enter__(self) -> "ShapedNetwork":
        try:
            self._ip("netns", "add", self.switch)
            self._ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", self.switch, "link", "set", "bridge", "up")
            for rank in range(self.ranks):
                self._join(rank)
        except BaseException:
            self._remove()
            raise
        return self

    def _join(self, rank: int) -> None:
        """A namespace, and a cable from it to a port of the switch."""
        port = f"port{rank}"
        self._ip("netns", "add", self.name(rank))
        self._ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0")
        self._ip("-n", self.switch, "link", "set", "eth0", "netns", self.name(rank))
        self._ip("-n", self.switch, "link", "set", port, "master", "bridge")
        self._ip("-n", self.switch, "link", "set", port, "up")
        self._ip("-n", self.name(rank), "addr", "add", f"{self.address(rank)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            self._ip("-n", self.name(rank), "link", "set", device, "up")
        for namespace, device in ((self.name(rank), "eth0"), (self.switch, port)):
            self._ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, *shape(self.rate))

    def start(self, rank: int, command: list[str], **options: object) -> "subprocess.Popen[str]":
        """Start a rank's process with what `torch.distributed` reads from the environment."""
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": "29611",
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        inside = ["ip", "netns", "exec", self.name(rank), *command]
        return subprocess.Popen(inside, env=env, text=True, **options)  # type: ignore[call-overload,no-any-return]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for name in (self.switch, *(self.name(rank) for rank in range(self.ranks))):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def sent_bytes(device: str = "eth0") -> int:
    """Bytes that left through a network device of this namespace, headers and acknowledgements included."""
    return int(Path(f"/sys/class/net/{device}/statistics/tx_bytes").read_text())
