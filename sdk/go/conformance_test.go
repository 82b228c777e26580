// SPDX-License-Identifier: Apache-2.0
package tandem

// A list of cases of tests/sdk, TANDEM_CASES, through this client, against
// TANDEM_ADDRESS (scripts/sdk.sh starts a cluster); and fold.json, without one.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"tandem/sdk/tandempb"
)

type testCase struct {
	Name              string
	Call              string
	Request           json.RawMessage
	TimeoutMs         int `json:"timeout_ms"`
	CancelAfterDeltas int `json:"cancel_after_deltas"`
	Expect            any
	Error             map[string]any
}

// Where `got` is not what conformance.json means by `want`; or "".
func differs(want, got any, at string) string {
	wrong := fmt.Sprintf("%s: %v, not %v", at, got, want)
	switch w := want.(type) {
	case float64:
		if got == nil {
			got = 0.0
		}
		if g, ok := got.(float64); ok && math.Abs(w-g) <= 1e-3 {
			return ""
		}
		return wrong
	case []any:
		g, ok := got.([]any)
		if !ok || len(g) != len(w) {
			return wrong
		}
		for i := range w {
			if d := differs(w[i], g[i], fmt.Sprintf("%s[%d]", at, i)); d != "" {
				return d
			}
		}
		return ""
	case map[string]any:
		g, ok := got.(map[string]any)
		if !ok {
			return wrong
		}
		for key, value := range w {
			if d := differs(value, g[key], at+"."+key); d != "" {
				return d
			}
		}
		return ""
	}
	if reflect.DeepEqual(want, got) {
		return ""
	}
	return wrong
}

func read[T any, P interface {
	*T
	proto.Message
}](t *testing.T, c testCase) P {
	message := P(new(T))
	if err := protojson.Unmarshal(c.Request, message); err != nil {
		t.Fatal(err)
	}
	return message
}

func answer(ctx context.Context, t *testing.T, client *Client, c testCase) (proto.Message, error) {
	switch c.Call {
	case "generate":
		stream, err := client.Generate(ctx, read[tandempb.GenerateRequest](t, c))
		if err != nil {
			return nil, err
		}
		deltas := 0
		for _, err := range stream.Deltas() {
			if err != nil {
				return nil, err
			}
			if deltas++; deltas == c.CancelAfterDeltas {
				stream.Cancel()
			}
		}
		return stream.Answer(), nil
	case "generate_once":
		return client.GenerateOnce(ctx, read[tandempb.GenerateRequest](t, c))
	case "tokenize":
		return client.Tokenize(ctx, read[tandempb.TokenizeRequest](t, c))
	case "detokenize":
		return client.Detokenize(ctx, read[tandempb.DetokenizeRequest](t, c))
	case "get_model":
		model, err := client.GetModel(ctx, read[tandempb.GetModelRequest](t, c).Model)
		return &tandempb.GetModelResponse{Model: model}, err
	case "list_models":
		models, err := client.ListModels(ctx)
		return &tandempb.ListModelsResponse{Models: models}, err
	}
	t.Fatalf("no call %s", c.Call)
	return nil, nil
}

// INVALID_ARGUMENT of InvalidArgument.
func codeName(e *Error) string {
	words := regexp.MustCompile("([a-z])([A-Z])").ReplaceAllString(e.Code.String(), "${1}_${2}")
	return strings.Replace(strings.ToUpper(words), "CANCELED", "CANCELLED", 1)
}

func verdict(t *testing.T, client *Client, c testCase) string {
	ctx := context.Background()
	if c.TimeoutMs > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(c.TimeoutMs)*time.Millisecond)
		defer cancel()
	}
	got, err := answer(ctx, t, client, c)
	var e *Error
	if errors.As(err, &e) && c.Error != nil {
		return differs(any(c.Error), map[string]any{
			"code": codeName(e), "reason": e.Reason, "field": e.Metadata["field"]}, "error")
	}
	if err != nil || c.Error != nil {
		return fmt.Sprintf("error %v, not %v", err, c.Error)
	}
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	var tree any
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	return differs(c.Expect, tree, "")
}

func TestConformance(t *testing.T) {
	if os.Getenv("TANDEM_ADDRESS") == "" {
		t.Skip("TANDEM_ADDRESS is not set: scripts/sdk.sh runs this")
	}
	text, err := os.ReadFile(os.Getenv("TANDEM_CASES"))
	if err != nil {
		t.Fatal(err)
	}
	var list struct{ Cases []testCase }
	if err := json.Unmarshal(text, &list); err != nil || len(list.Cases) == 0 {
		t.Fatal(err)
	}
	client, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	for _, c := range list.Cases {
		t.Run(c.Name, func(t *testing.T) {
			if wrong := verdict(t, client, c); wrong != "" {
				t.Error(wrong)
			}
		})
	}
}

func TestCloseEndsWhatRunsAndCallsAfterIt(t *testing.T) {
	if os.Getenv("TANDEM_ADDRESS") == "" {
		t.Skip("TANDEM_ADDRESS is not set: scripts/sdk.sh runs this")
	}
	request := &tandempb.GenerateRequest{
		Prompt:   &tandempb.GenerateRequest_Text{Text: "a"},
		Sampling: &tandempb.SamplingOptions{Temperature: proto.Float32(0)},
		Stopping: &tandempb.StoppingOptions{
			MaxTokens: proto.Int32(900), IgnoreEos: proto.Bool(true)},
	}
	client, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	stream, err := client.Generate(ctx, request)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := client.Close(); err != nil {
			t.Errorf("Close %d: %v", i, err)
		}
	}
	_, running := stream.Collect()
	_, once := client.GenerateOnce(ctx, request)
	_, streaming := client.Generate(ctx, request)
	for _, err := range []error{running, once, streaming} {
		var e *Error
		if !errors.As(err, &e) || codeName(e) != "CANCELLED" {
			t.Errorf("%v is not CANCELLED", err)
		}
	}
}

func TestStreamsFoldIntoOneAnswer(t *testing.T) {
	text, err := os.ReadFile("../../tests/sdk/fold.json")
	if err != nil {
		t.Fatal(err)
	}
	var fold struct {
		Events []json.RawMessage
		Answer json.RawMessage
	}
	if err := json.Unmarshal(text, &fold); err != nil || len(fold.Events) == 0 {
		t.Fatal(err)
	}
	stream := newStream(nil, func() {})
	for _, text := range fold.Events {
		event := &tandempb.GenerateResponse{}
		if err := protojson.Unmarshal(text, event); err != nil {
			t.Fatal(err)
		}
		stream.add(event)
	}
	want := &tandempb.GenerateOnceResponse{}
	if err := protojson.Unmarshal(fold.Answer, want); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(stream.Answer(), want) {
		t.Errorf("%v, not %v", stream.Answer(), want)
	}
}

func TestOptionsThatContradict(t *testing.T) {
	for _, options := range []Options{{Cert: "c"}, {Key: "k"}, {Cert: "c", Key: "k"}} {
		if _, err := New(options); err == nil {
			t.Errorf("%+v is taken", options)
		}
	}
}
