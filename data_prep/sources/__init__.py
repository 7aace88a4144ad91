"""Readers of data on disk and on the hub, each of which yields `Conversation`s; one module per format (`kinds.KINDS`)."""

from data_prep.sources.base import open_source
from data_prep.sources.files import check_path
from data_prep.sources.kinds import KINDS, Content, Kind, SourceConfig, check_source

__all__ = ["KINDS", "Content", "Kind", "SourceConfig", "check_path", "check_source", "open_source"]
