"""A rank that `workers.start` has started: python -m ddp_experiments.worker FILE PARENT."""

import json
import signal
import sys
from pathlib import Path

from ddp_experiments import process


def main() -> None:
    """Run the config that the parent has composed and checked."""
    process.die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback from the midst of imports

    from omegaconf import DictConfig, OmegaConf

    from ddp_experiments import config, launch, rank
    from ddp_experiments.errors import Exit, Refused
    from ddp_experiments.identity import Origin

    origin = Origin(**json.loads(Path(sys.argv[1]).read_text()))
    cfg = OmegaConf.merge(OmegaConf.structured(config.Config), origin.settings)
    assert isinstance(cfg, DictConfig)
    try:
        rank.be_rank(config.typed(cfg), origin)
    except Refused as refusal:
        launch.refuse(refusal.faults)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
