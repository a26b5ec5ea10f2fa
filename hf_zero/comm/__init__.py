"""All that talks to other ranks: collectives, and errors that all ranks raise or none."""
