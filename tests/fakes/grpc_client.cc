// Asks a gRPC server by grpc's C++: lines of hex are messages, which are asked all at once; prints the answers in order.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

struct Call {
  grpc::ClientContext context;
  grpc::ByteBuffer answer;
  grpc::Status status;
  std::unique_ptr<grpc::GenericClientAsyncResponseReader> reader;
};

int main(int, char **words) {
  grpc::GenericStub stub(grpc::CreateChannel(words[1], grpc::InsecureChannelCredentials()));
  grpc::CompletionQueue queue;
  std::vector<std::unique_ptr<Call>> calls;
  for (std::string line; std::getline(std::cin, line);) {
    std::string data;
    for (size_t at = 0; at + 1 < line.size(); at += 2) data += (char)std::stoi(line.substr(at, 2), nullptr, 16);
    grpc::Slice slice(data);
    grpc::ByteBuffer message(&slice, 1);
    calls.push_back(std::make_unique<Call>());
    Call &call = *calls.back();
    call.context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    call.reader = stub.PrepareUnaryCall(&call.context, words[2], message, &queue);
    call.reader->StartCall();
    call.reader->Finish(&call.answer, &call.status, &call);
  }
  void *tag;
  bool is_ok;
  for (size_t done = 0; done < calls.size() && queue.Next(&tag, &is_ok); done++) {}
  for (auto &call : calls) {
    if (!call->status.ok()) {
      auto found = call->context.GetServerTrailingMetadata().find("edge-runtime-code");
      std::printf("error %d %s\n", call->status.error_code(), std::string(found->second.data(), found->second.size()).c_str());
      continue;
    }
    std::vector<grpc::Slice> parts;
    call->answer.Dump(&parts);
    for (auto &part : parts)
      for (size_t at = 0; at < part.size(); at++) std::printf("%02x", part.begin()[at]);
    std::printf("\n");
  }
}
