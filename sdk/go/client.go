// SPDX-License-Identifier: Apache-2.0

// Package tandem is a client of a Tandem cluster.
//
//	client, err := tandem.New(tandem.Options{Address: "127.0.0.1:50051"})
//	stream, err := client.Generate(ctx, &tandempb.GenerateRequest{
//		Prompt: &tandempb.GenerateRequest_Text{Text: "Once upon a time"},
//	})
//	for delta, err := range stream.Deltas() { ... }
//
// Messages are those of proto/tandem/v1/inference.proto, which says what each
// field means. A context's deadline and its cancellation stop the work.
package tandem

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tandem/sdk/tandempb"
)

//go:generate ./generate.sh

// Only what was refused before it began is tried again (gRFC A6): the server
// sends no header before it has admitted a request.
const serviceConfig = `{
  "methodConfig": [{
    "name": [{"service": "tandem.v1.InferenceService"}],
    "retryPolicy": {
      "maxAttempts": 4,
      "initialBackoff": "0.2s",
      "maxBackoff": "2s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`

// Options say how to reach a router. What is empty comes from the environment.
type Options struct {
	Address string // TANDEM_ADDRESS, else 127.0.0.1:50051
	APIKey  string // TANDEM_API_KEY
	// PEM files. A CA means TLS; certificate and key, mutual TLS.
	CA   string // TANDEM_CA
	Cert string // TANDEM_CERT
	Key  string // TANDEM_KEY
}

func (o *Options) resolve() error {
	for _, v := range []struct {
		field *string
		name  string
	}{
		{&o.Address, "TANDEM_ADDRESS"}, {&o.APIKey, "TANDEM_API_KEY"},
		{&o.CA, "TANDEM_CA"}, {&o.Cert, "TANDEM_CERT"}, {&o.Key, "TANDEM_KEY"},
	} {
		if *v.field == "" {
			*v.field = os.Getenv(v.name)
		}
	}
	if o.Address == "" {
		o.Address = "127.0.0.1:50051"
	}
	if (o.Cert == "") != (o.Key == "") {
		return errors.New("Cert and Key (TANDEM_CERT, TANDEM_KEY) go together")
	}
	if o.Cert != "" && o.CA == "" {
		return errors.New("Cert (TANDEM_CERT) needs CA (TANDEM_CA)")
	}
	return nil
}

func (o *Options) credentials() (credentials.TransportCredentials, error) {
	if o.CA == "" {
		return insecure.NewCredentials(), nil
	}
	pem, err := os.ReadFile(o.CA)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate", o.CA)
	}
	if o.Cert != "" {
		pair, err := tls.LoadX509KeyPair(o.Cert, o.Key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(config), nil
}

// Error is a call that failed: the gRPC status, and what its ErrorInfo says.
type Error struct {
	Code     codes.Code
	Message  string
	Reason   string // "FIELD_INVALID"; empty where the server did not say
	Metadata map[string]string
	// After which a retry may succeed; 0 where the server did not say.
	RetryAfter time.Duration
}

func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s (%s): %s", e.Code, e.Reason, e.Message)
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	s := status.Convert(err)
	e := &Error{Code: s.Code(), Message: s.Message()}
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			e.Reason, e.Metadata = d.Reason, d.Metadata
		case *errdetails.RetryInfo:
			e.RetryAfter = d.RetryDelay.AsDuration()
		}
	}
	return e
}

// Client is one connection, safe for concurrent use. Calls that fail return an
// *Error.
type Client struct {
	conn *grpc.ClientConn
	stub tandempb.InferenceServiceClient
	key  string

	closing sync.Once
}

// New does not wait for the connection: the first call does.
func New(options Options) (*Client, error) {
	if err := options.resolve(); err != nil {
		return nil, err
	}
	transport, err := options.credentials()
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(options.Address,
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(serviceConfig),
		// A long prompt is a long silence.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64<<20)))
	if err != nil {
		return nil, err
	}
	return &Client{conn: conn, stub: tandempb.NewInferenceServiceClient(conn), key: options.APIKey}, nil
}

// Close ends what still runs with codes.Canceled, and so do calls after it. Once
// closed, it does nothing.
func (c *Client) Close() error {
	var err error
	c.closing.Do(func() { err = c.conn.Close() })
	return err
}

func (c *Client) context(ctx context.Context) context.Context {
	if c.key == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.key)
}

// Stream is deltas as they come. Read it to its end or Cancel it.
type Stream struct {
	call      grpc.ServerStreamingClient[tandempb.GenerateResponse]
	cancel    context.CancelFunc
	answer    *tandempb.GenerateOnceResponse
	sequences map[int32]*tandempb.GeneratedSequence
}

func (c *Client) Generate(ctx context.Context, request *tandempb.GenerateRequest) (*Stream, error) {
	ctx, cancel := context.WithCancel(c.context(ctx))
	call, err := c.stub.Generate(ctx, request)
	if err != nil {
		cancel()
		return nil, wrap(err)
	}
	return newStream(call, cancel), nil
}

func newStream(call grpc.ServerStreamingClient[tandempb.GenerateResponse], cancel context.CancelFunc) *Stream {
	return &Stream{call, cancel, &tandempb.GenerateOnceResponse{},
		map[int32]*tandempb.GeneratedSequence{}}
}

// Cancel stops the call and the work behind it.
func (s *Stream) Cancel() { s.cancel() }

// Answer is what is known so far: Started from the first delta on, Done and the
// sequences after the last.
func (s *Stream) Answer() *tandempb.GenerateOnceResponse { return s.answer }

// Deltas ends after the last, or with an error. Leaving the loop cancels.
func (s *Stream) Deltas() iter.Seq2[*tandempb.GenerateDelta, error] {
	return func(yield func(*tandempb.GenerateDelta, error) bool) {
		defer s.cancel()
		for {
			event, err := s.call.Recv()
			if err == io.EOF {
				return
			}
			if err != nil {
				yield(nil, wrap(err))
				return
			}
			if delta := s.add(event); delta != nil && !yield(delta, nil) {
				return
			}
		}
	}
}

// Collect reads what is left; the whole answer, what was iterated included.
func (s *Stream) Collect() (*tandempb.GenerateOnceResponse, error) {
	for _, err := range s.Deltas() {
		if err != nil {
			return nil, err
		}
	}
	return s.answer, nil
}

func (s *Stream) sequence(index int32) *tandempb.GeneratedSequence {
	if s.sequences[index] == nil {
		s.sequences[index] = &tandempb.GeneratedSequence{Index: index}
	}
	return s.sequences[index]
}

// joinToolCalls adds the pieces of calls to the calls that they belong to.
func joinToolCalls(pieces []*tandempb.ToolCallDelta, sequence *tandempb.GeneratedSequence) {
	for _, piece := range pieces {
		for len(sequence.ToolCalls) <= int(piece.Index) {
			sequence.ToolCalls = append(sequence.ToolCalls, &tandempb.ToolCall{})
		}
		call := sequence.ToolCalls[piece.Index]
		call.Id += piece.Id
		call.Name += piece.Name
		call.ArgumentsJson += piece.ArgumentsJson
	}
}

func (s *Stream) add(event *tandempb.GenerateResponse) *tandempb.GenerateDelta {
	if event.RequestId != "" {
		s.answer.RequestId = event.RequestId
	}
	switch e := event.Event.(type) {
	case *tandempb.GenerateResponse_Started:
		s.answer.Started = e.Started
	case *tandempb.GenerateResponse_PromptLogprobs:
		s.answer.PromptLogprobs = append(s.answer.PromptLogprobs, e.PromptLogprobs.Tokens...)
	case *tandempb.GenerateResponse_Finished:
		s.sequence(e.Finished.Index).Finished = e.Finished
	case *tandempb.GenerateResponse_Done:
		s.answer.Done = e.Done
		for _, sequence := range s.sequences {
			s.answer.Sequences = append(s.answer.Sequences, sequence)
		}
		slices.SortFunc(s.answer.Sequences, func(a, b *tandempb.GeneratedSequence) int {
			return int(a.Index - b.Index)
		})
	case *tandempb.GenerateResponse_Delta:
		sequence := s.sequence(e.Delta.Index)
		sequence.Text += e.Delta.Text
		sequence.ReasoningContent += e.Delta.ReasoningContent
		sequence.TokenIds = append(sequence.TokenIds, e.Delta.TokenIds...)
		sequence.Logprobs = append(sequence.Logprobs, e.Delta.Logprobs...)
		sequence.Attention = append(sequence.Attention, e.Delta.Attention...)
		joinToolCalls(e.Delta.ToolCalls, sequence)
		return e.Delta
	}
	return nil
}

func (c *Client) GenerateOnce(ctx context.Context, request *tandempb.GenerateRequest) (*tandempb.GenerateOnceResponse, error) {
	answer, err := c.stub.GenerateOnce(c.context(ctx), request)
	return answer, wrap(err)
}

func (c *Client) Tokenize(ctx context.Context, request *tandempb.TokenizeRequest) (*tandempb.TokenizeResponse, error) {
	answer, err := c.stub.Tokenize(c.context(ctx), request)
	return answer, wrap(err)
}

func (c *Client) Detokenize(ctx context.Context, request *tandempb.DetokenizeRequest) (*tandempb.DetokenizeResponse, error) {
	answer, err := c.stub.Detokenize(c.context(ctx), request)
	return answer, wrap(err)
}

func (c *Client) ListModels(ctx context.Context) ([]*tandempb.ModelInfo, error) {
	answer, err := c.stub.ListModels(c.context(ctx), &tandempb.ListModelsRequest{})
	return answer.GetModels(), wrap(err)
}

// GetModel of an empty name is the only one served.
func (c *Client) GetModel(ctx context.Context, model string) (*tandempb.ModelInfo, error) {
	answer, err := c.stub.GetModel(c.context(ctx), &tandempb.GetModelRequest{Model: model})
	return answer.GetModel(), wrap(err)
}
