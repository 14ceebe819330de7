from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Message(_message.Message):
    __slots__ = ("sender", "agreement", "hello", "announcement", "request", "header")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    sender: str
    agreement: bytes
    hello: Hello
    announcement: Announcement
    request: Request
    header: Header
    def __init__(self, sender: _Optional[str] = ..., agreement: _Optional[bytes] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., announcement: _Optional[_Union[Announcement, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., header: _Optional[_Union[Header, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("round", "address")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    round: int
    address: str
    def __init__(self, round: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("round", "exchange", "clusters", "weights", "wants", "note", "degree")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    DEGREE_FIELD_NUMBER: _ClassVar[int]
    round: int
    exchange: int
    clusters: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    wants: _containers.RepeatedScalarFieldContainer[int]
    note: int
    degree: int
    def __init__(self, round: _Optional[int] = ..., exchange: _Optional[int] = ..., clusters: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., wants: _Optional[_Iterable[int]] = ..., note: _Optional[int] = ..., degree: _Optional[int] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("round", "exchange", "wants", "size", "is_model")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    IS_MODEL_FIELD_NUMBER: _ClassVar[int]
    round: int
    exchange: int
    wants: _containers.RepeatedScalarFieldContainer[int]
    size: int
    is_model: bool
    def __init__(self, round: _Optional[int] = ..., exchange: _Optional[int] = ..., wants: _Optional[_Iterable[int]] = ..., size: _Optional[int] = ..., is_model: _Optional[bool] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("round", "exchange", "clusters", "total", "sha256")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    round: int
    exchange: int
    clusters: _containers.RepeatedScalarFieldContainer[int]
    total: int
    sha256: bytes
    def __init__(self, round: _Optional[int] = ..., exchange: _Optional[int] = ..., clusters: _Optional[_Iterable[int]] = ..., total: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "crc32", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    crc32: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., crc32: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
