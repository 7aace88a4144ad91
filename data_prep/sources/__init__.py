"""Readers of data on disk and on the hub, each of which yields `Conversation`s; one module per format (`files.KINDS`)."""

from data_prep.sources.base import open_source
from data_prep.sources.files import KINDS, Content, Kind, SourceConfig, check_path, check_source

__all__ = ["KINDS", "Content", "Kind", "SourceConfig", "check_path", "check_source", "open_source"]
