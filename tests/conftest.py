"""Set before torch is imported anywhere: threads that spin while they wait make a shared core many times slower."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
