"""Device and link profiles: what the hardware can hold and how fast it is, with sources."""

from autoplan.profiles.catalog import (
    ALIASES,
    dump_profile,
    list_profiles,
    load_profile,
    save_profile,
)
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from autoplan.profiles.origin import Origin
from autoplan.profiles.tables import (
    AttentionTable,
    Collective,
    CollectiveTable,
    GemmTable,
    Lookup,
    MemoryTable,
)

__all__ = [
    "ALIASES",
    "AttentionTable",
    "Collective",
    "CollectiveTable",
    "DeviceProfile",
    "GemmTable",
    "LinkProfile",
    "Lookup",
    "MemoryTable",
    "Origin",
    "dump_profile",
    "list_profiles",
    "load_profile",
    "save_profile",
]
