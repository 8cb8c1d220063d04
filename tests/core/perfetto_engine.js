// Perfetto's trace processor as its web page runs it, in a worker, behind standard input and output: frames of a
// length (32 bits, little endian) and that many bytes, each of them a TraceProcessorRpcStream.
//
//     node perfetto_engine.js FOLDER_OF_THE_WEB_PAGE
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const worker = {
  TextDecoder, performance, URL,
  console: { log: console.error, warn: console.error, error: console.error, info: console.error },
  location: { href: "file:///engine_bundle.js" },
  importScripts: () => {},
  WorkerGlobalScope: class {},
  XMLHttpRequest: class {
    open(method, name) {
      this.name = path.basename(name);
    }
    send() {
      this.response = fs.readFileSync(path.join(folder, this.name));
    }
  },
};
worker.self = worker;
worker.globalThis = worker;
vm.createContext(worker);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), worker);

const port = {
  onmessage: null,
  postMessage: (reply) => {
    const head = Buffer.alloc(4);
    head.writeUInt32LE(reply.length);
    fs.writeSync(1, Buffer.concat([head, reply]));
  },
};
worker.onmessage({ data: port });

let waiting = Buffer.alloc(0);
process.stdin.on("data", (chunk) => {
  waiting = Buffer.concat([waiting, chunk]);
  while (waiting.length >= 4 && waiting.length >= 4 + waiting.readUInt32LE(0)) {
    const end = 4 + waiting.readUInt32LE(0);
    // Of the worker's realm, which is what the engine asks for.
    const request = vm.runInContext("(bytes) => new Uint8Array(bytes)", worker)(waiting.subarray(4, end));
    waiting = waiting.subarray(end);
    port.onmessage({ data: request });
  }
});
