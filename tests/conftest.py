"""Before torch is imported anywhere: waiting threads must not spin, or a shared core makes every test many times slower."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
