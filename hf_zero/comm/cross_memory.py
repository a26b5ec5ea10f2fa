"""Memory shared between processes of one machine: mailboxes that other ranks write into, and reads of their buffers.

Linux's `process_vm_readv` and `process_vm_writev`; see `direct`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from typing import Any

MAX_SPANS = 4096
"""Spans for which a mailbox has room. Messages of later ones go through sockets."""
SLOTS = 4
"""Messages of one key that a rank may send before its peers take the first."""
_MAGIC = 0x5A65_726F_426F_6172
_WORD = 8


class Mailbox:
    """Memory that other ranks write into, in pairs of a word and its complement: a reader detects a torn write.

    For each key and other rank: its last messages (address, step and number in one word), and the number up to which it has
    taken this rank's messages. Untouched pages take no memory.
    """

    def __init__(self, size: int) -> None:
        self._size, self._row = size, size * (SLOTS + 1)
        nbytes = 2 * (1 + 2 * MAX_SPANS * self._row) * _WORD
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Never freed: a peer may write here after this rank has released the group, and would corrupt new data at this address.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._memory))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.words = memoryview(self._memory).cast("q")
        self.words[0] = _MAGIC

    def slot_index(self, key: int, number: int) -> int:
        """Return the index in `words` of rank 0's pair for a message. The pairs of the other ranks follow."""
        return 2 * (1 + key * self._row + number % SLOTS * self._size)

    def ack_index(self, key: int) -> int:
        """Return the index in `words` of rank 0's acknowledgement. Those of the other ranks follow."""
        return 2 * (1 + key * self._row + SLOTS * self._size)


class _Part(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Peer:
    """Another rank's memory: its rank, its process id, and the address of its `Mailbox`."""

    def __init__(self, rank: int, process: int, mailbox: int) -> None:
        self.rank, self.process, self.mailbox = rank, process, mailbox

    def read(self, there: int, here: int, nbytes: int) -> None:
        """Copy `nbytes` from the peer's address `there` to this process's address `here`.

        Raises:
            RuntimeError: the process has ended, or has no such memory.
        """
        call, _ = _system_calls()
        while nbytes:  # the kernel moves at most 2 GiB at once
            mine, theirs = _Part(here, nbytes), _Part(there, nbytes)
            moved = call(self.process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
            if moved <= 0:
                raise self.error()
            here, there, nbytes = here + moved, there + moved, nbytes - moved

    def error(self) -> RuntimeError:
        """Return the error for a system call that has just failed."""
        why = os.strerror(ctypes.get_errno())
        return RuntimeError(f"connection closed by peer: memory of rank {self.rank} (process {self.process}): {why}")

    @property
    def is_alive(self) -> bool:
        """Return True if the process is alive, receives messages for that mailbox, and may be read."""
        found = ctypes.c_int64()
        try:
            self.read(self.mailbox, ctypes.addressof(found), _WORD)
        except RuntimeError:
            return False
        return found.value == _MAGIC

    def accepts_writes(self, rank: int, index: int) -> bool:
        """Write that `rank` has received no message yet; return False if a sandbox refuses the call."""
        try:
            MailboxWriter(self, rank).write(0, index)
        except RuntimeError:
            return False
        return True


class MailboxWriter:
    """Writes pairs of words into a peer's mailbox. For one thread.

    Args:
        peer: owns the mailbox.
        rank: this rank.
    """

    def __init__(self, peer: Peer, rank: int) -> None:
        _, self._call = _system_calls()
        self._peer, self._base = peer, peer.mailbox + 2 * rank * _WORD
        self._words = (ctypes.c_int64 * 2)()
        self._there = _Part(0, 2 * _WORD)
        self._parts = ctypes.byref(_Part(ctypes.addressof(self._words), 2 * _WORD)), ctypes.byref(self._there)

    def write(self, word: int, index: int) -> None:
        """Write a word into this rank's pair; `index` is that of rank 0's pair.

        Raises:
            RuntimeError: the process has ended.
        """
        self._words[0], self._words[1] = word, ~word
        self._there.base = self._base + index * _WORD
        here, there = self._parts
        if self._call(self._peer.process, here, 1, there, 1, 0) != 2 * _WORD:
            raise self._peer.error()


def machine_id() -> str:
    """Return an id of the machine and its process numbers; empty if the system calls are missing."""
    if not sys.platform.startswith("linux") or _system_calls() == (None, None):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@cache
def _system_calls() -> tuple[Any, Any]:
    word, count = ctypes.c_void_p, ctypes.c_ulong
    kind = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, word, count, word, count, count, use_errno=True)
    library = ctypes.CDLL(None)
    try:
        return kind(("process_vm_readv", library)), kind(("process_vm_writev", library))
    except AttributeError:
        return None, None
