"""Every face there is; a new one is added here and has its column in docs/http.md's table."""

from tests.e2e.faces.libretranslate import LibreTranslate
from tests.e2e.faces.native_grpc import NativeGrpc
from tests.e2e.faces.native_http import NativeHttp
from tests.e2e.faces.oip_grpc import OipGrpc
from tests.e2e.faces.oip_rest import OipRest
from tests.e2e.faces.told import Face

FACES: tuple[type[Face], ...] = (NativeGrpc, OipGrpc, NativeHttp, OipRest, LibreTranslate)
