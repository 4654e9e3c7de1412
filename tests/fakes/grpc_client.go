// Asks a gRPC server by grpc-go: lines of hex are messages, which are asked all at once; prints the answers in order.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error)      { return v.([]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error { *v.(*[]byte) = append([]byte{}, data...); return nil }
func (raw) Name() string                               { return "proto" }

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithBlock())
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<24)
	var answers []*string
	var all sync.WaitGroup
	for lines.Scan() {
		message, _ := hex.DecodeString(lines.Text())
		answer := new(string)
		answers = append(answers, answer)
		all.Add(1)
		go func() {
			defer all.Done()
			var found []byte
			var trailer metadata.MD
			err := connection.Invoke(ctx, os.Args[2], message, &found, grpc.ForceCodec(raw{}), grpc.Trailer(&trailer))
			if err != nil {
				*answer = fmt.Sprintf("error %d %s", status.Code(err), trailer.Get("edge-runtime-code")[0])
				return
			}
			*answer = hex.EncodeToString(found)
		}()
	}
	all.Wait()
	for _, each := range answers {
		fmt.Println(*each)
	}
}
