# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/otlp/export.bin: a message to a collector as the official
package serialises it, with every field that the router uses.

  pip install opentelemetry-proto==1.45.2
  python3 tools/oracle/make_otlp_golden.py
"""
import pathlib

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2


def attribute(key: str, **value) -> common_pb2.KeyValue:
    return common_pb2.KeyValue(key=key, value=common_pb2.AnyValue(**value))


def main() -> None:
    reasons = common_pb2.ArrayValue(values=[common_pb2.AnyValue(string_value="stop")])
    span = trace_pb2.Span(
        trace_id=bytes(range(16)), span_id=bytes(range(8)), trace_state="a=b",
        parent_span_id=bytes(range(8, 16)), name="chat tales",
        kind=trace_pb2.Span.SPAN_KIND_SERVER, start_time_unix_nano=1,
        end_time_unix_nano=2**63, flags=1,
        attributes=[attribute("text", string_value="x"), attribute("truth", bool_value=True),
                    attribute("count", int_value=-7), attribute("share", double_value=0.5),
                    attribute("reasons", array_value=reasons)],
        events=[trace_pb2.Span.Event(time_unix_nano=3, name="retry",
                                     attributes=[attribute("cause", string_value="y")])],
        status=trace_pb2.Status(message="WORKER_LOST",
                                code=trace_pb2.Status.STATUS_CODE_ERROR))
    request = trace_service_pb2.ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.append(attribute("service.name", string_value="tandem"))
    scope = resource.scope_spans.add()
    scope.scope.name = "tandem"
    scope.scope.version = "1.2.3"
    scope.spans.append(span)
    out = pathlib.Path(__file__).parents[2] / "tests/golden/otlp/export.bin"
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(request.SerializeToString(deterministic=True))


if __name__ == "__main__":
    main()
