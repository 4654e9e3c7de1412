// Asks a gRPC server by grpc-js: lines of hex are messages, which are asked all at once; prints the answers in order.
"use strict";
const grpc = require("@grpc/grpc-js");
const [address, path] = process.argv.slice(2);
const messages = require("fs").readFileSync(0, "utf8").split("\n").filter((line) => line).map((line) => Buffer.from(line, "hex"));
const client = new grpc.Client(address, grpc.credentials.createInsecure());
const same = (bytes) => bytes;
const asked = messages.map((message) => new Promise((done) => {
  client.makeUnaryRequest(path, same, same, message, new grpc.Metadata(), { deadline: Date.now() + 60000 },
    (error, answer) => done(error ? "error " + error.code + " " + error.metadata.get("edge-runtime-code") : answer.toString("hex")));
}));
Promise.all(asked).then((answers) => { console.log(answers.join("\n")); client.close(); });
