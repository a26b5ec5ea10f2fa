"""`hf-zero probe`: this machine, measured."""

from __future__ import annotations

import sys
from pathlib import Path

from ..comm.group_wire import open_wire
from ..comm.watch import STALL_S
from ..errors import ConfigError
from ..huggingface.plugin import ZeroAccelerator
from ..plan.machine import busy_share, kept, probe
from . import plan_tables
from .asked import cache_folder
from .commands import print_json
from .doctor import BUSY
from .files import writable
from .options import ProbeOptions


def run(options: ProbeOptions) -> None:
    if options.offload_dir is not None and not Path(options.offload_dir).is_dir():
        raise ConfigError(
            f"no such folder: {options.offload_dir} (--offload-dir measures the disk of a folder that is there)"
        )
    writable(options.output)
    busy = busy_share()
    accelerator = ZeroAccelerator()  # joins the ranks that torchrun has started, and says which device is this one's
    try:
        wire = open_wire(accelerator.device)
        wire.start(STALL_S)  # messages as an engine's
        machine = probe(accelerator.device, wire, ranks=wire.ranks_here(), offload_dir=options.offload_dir)
        if wire.rank == 0:
            path = kept(cache_folder()) if options.output is None else Path(options.output)
            replaced = options.output is None and path.exists()
            machine.keep(path)
            if busy > BUSY:
                print(
                    f"hf-zero: other programs used {busy:.0%} of the processors when this began: the figures are too low; "
                    "measure again when the machine is idle",
                    file=sys.stderr,
                )
            if options.json:
                print_json(machine.to_dict())
            else:
                plan_tables.machine(machine, wire.size, path, replaced, options.output is None)
    finally:
        accelerator.end_training()
