// SPDX-License-Identifier: Apache-2.0
// What a failed call's trailer says: google.rpc.Status with ErrorInfo and
// RetryInfo. Three small messages, so read here and not generated.

import { BinaryReader } from "@bufbuild/protobuf/wire";

export interface Details {
  reason: string;
  metadata: Record<string, string>;
  retryAfterMs: number | undefined;
}

// Calls `field` with each field's number; it reads it, or returns false.
function read(bytes: Uint8Array, field: (number: number, reader: BinaryReader) => unknown): void {
  const reader = new BinaryReader(bytes);
  while (reader.pos < reader.len) {
    const [number, type] = reader.tag();
    if (field(number, reader) === false) reader.skip(type);
  }
}

function readPair(bytes: Uint8Array): [string, string] {
  const pair: [string, string] = ["", ""];
  read(bytes, (number, reader) => {
    if (number !== 1 && number !== 2) return false;
    pair[number - 1] = reader.string();
    return true;
  });
  return pair;
}

function readDuration(bytes: Uint8Array): number {
  let ms = 0;
  read(bytes, (number, reader) => {
    if (number === 1) ms += Number(reader.int64()) * 1000;
    else if (number === 2) ms += reader.int32() / 1e6;
    else return false;
    return true;
  });
  return ms;
}

function readAny(bytes: Uint8Array, details: Details): void {
  let type = "";
  let value: Uint8Array = new Uint8Array();
  read(bytes, (number, reader) => {
    if (number === 1) type = reader.string();
    else if (number === 2) value = reader.bytes();
    else return false;
    return true;
  });
  read(value, (number, reader) => {
    if (type.endsWith("/google.rpc.ErrorInfo") && number === 1) {
      details.reason = reader.string();
    } else if (type.endsWith("/google.rpc.ErrorInfo") && number === 3) {
      const [key, text] = readPair(reader.bytes());
      details.metadata[key] = text;
    } else if (type.endsWith("/google.rpc.RetryInfo") && number === 1) {
      details.retryAfterMs = readDuration(reader.bytes());
    } else {
      return false;
    }
    return true;
  });
}

export function readDetails(status: Uint8Array): Details {
  const details: Details = { reason: "", metadata: {}, retryAfterMs: undefined };
  read(status, (number, reader) => {
    if (number !== 3) return false;
    readAny(reader.bytes(), details);
    return true;
  });
  return details;
}
