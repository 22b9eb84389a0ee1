"""No test reads what was measured on this machine."""

from __future__ import annotations

import os

from autoplan.profiles.op_times import CACHE_VARIABLE

os.environ[CACHE_VARIABLE] = "off"
