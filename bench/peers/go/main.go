// The Go libraries as contestants; ../README.md defines the protocol.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

// lock acquires, waiting, and returns what releases.
type lock func() (release func() error, err error)

type library struct {
	module string
	open   func(client redis.UniversalClient, lease time.Duration) func(name string) lock
}

// ofRedsync asks for a held lock after these pauses.
func ofRedsync(pauses ...redsync.Option) library {
	return library{"github.com/go-redsync/redsync/v4", func(client redis.UniversalClient, lease time.Duration) func(string) lock {
		sync := redsync.New(goredis.NewPool(client))
		return func(name string) lock {
			return func() (func() error, error) {
				// More than its 32 tries.
				options := append([]redsync.Option{redsync.WithExpiry(lease), redsync.WithTries(1_000_000)}, pauses...)
				mutex := sync.NewMutex("redsync:"+name, options...)
				if err := mutex.Lock(); err != nil {
					return nil, err
				}
				return func() error { _, err := mutex.Unlock(); return err }, nil
			}
		}
	}}
}

var ctx = context.Background()

var libraries = map[string]library{
	// Its README's way to wait: every 100 ms. Without a deadline of the caller's it gives up after the lease.
	"redislock": {"github.com/bsm/redislock", func(client redis.UniversalClient, lease time.Duration) func(string) lock {
		locker := redislock.New(client)
		return func(name string) lock {
			return func() (func() error, error) {
				waiting, cancel := context.WithTimeout(ctx, time.Hour)
				defer cancel()
				options := &redislock.Options{RetryStrategy: redislock.LinearBackoff(100 * time.Millisecond)}
				held, err := locker.Obtain(waiting, "redislock:"+name, lease, options)
				if err != nil {
					return nil, err
				}
				return func() error { return held.Release(ctx) }, nil
			}
		}
	}},
	"redsync":        ofRedsync(), // its default: 50 to 250 ms
	"redsync (10 ms)": ofRedsync(redsync.WithRetryDelay(10 * time.Millisecond)),
}

type answer map[string]any

type process struct {
	library library
	url     string
	lease   time.Duration
	clients map[int]func(string) lock
	kept    []func() error
}

func main() {
	millis, err := strconv.Atoi(os.Args[3])
	check(err)
	chosen := libraries[os.Args[1]]
	peer := process{chosen, os.Args[2], time.Duration(millis) * time.Millisecond, map[int]func(string) lock{}, nil}
	say(answer{"ready": chosen.module + " " + version(chosen.module) + ", " + runtime.Version()})
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		said, err := peer.obey(strings.Split(lines.Text(), " "))
		if err != nil {
			said = answer{"error": err.Error()}
		}
		say(said)
	}
}

func (p *process) obey(words []string) (answer, error) {
	count := func(at int) int { number, err := strconv.Atoi(words[at]); check(err); return number }
	millis := func(at int) time.Duration { return time.Duration(count(at)) * time.Millisecond }
	switch words[0] {
	case "cycle":
		switch words[1] {
		case "main", "task":
			return p.cycle(words[1], count(2), millis(3))
		case "again":
			return nil, fmt.Errorf("it has no re-entry")
		case "read":
			return nil, fmt.Errorf("it has no shared locks")
		}
		return nil, fmt.Errorf("it has no permits")
	case "contend":
		return p.contend(count(1), millis(2))
	case "keep":
		return nil, fmt.Errorf("it has no renewal")
	case "free":
		lost := 0
		for _, release := range p.kept {
			if release() != nil {
				lost++
			}
		}
		p.kept = nil
		return answer{"lost": lost}, nil
	case "names":
		began, visited := time.Now(), 0
		names := make(chan int)
		go func() {
			for ; visited < count(1) && time.Since(began) < millis(2); visited++ {
				names <- visited
			}
			close(names)
		}()
		err := together(128, func(int) error {
			for at := range names {
				release, err := p.client(0)(fmt.Sprint("named:", count(1), ":", at))()
				if err != nil {
					return err
				}
				if err := release(); err != nil {
					return err
				}
			}
			return nil
		})
		return answer{"ops": visited, "nanos": time.Since(began).Nanoseconds()}, err
	case "wait":
		acquire := p.client(0)("waited")
		if _, err := acquire(); err != nil {
			return nil, err
		}
		for range count(1) {
			go acquire()
		}
		time.Sleep(500 * time.Millisecond)
		return answer{"ops": count(1)}, nil
	case "take":
		release, err := p.client(0)(words[1])()
		p.kept = append(p.kept, release)
		return answer{"got": time.Now().UnixMicro()}, err
	}
	return nil, fmt.Errorf("no command %q", words)
}

var clients sync.Mutex

// client has connections of its own.
func (p *process) client(at int) func(string) lock {
	clients.Lock()
	defer clients.Unlock()
	if p.clients[at] == nil {
		options, err := redis.ParseURL(p.url)
		check(err)
		p.clients[at] = p.library.open(redis.NewClient(options), p.lease)
	}
	return p.clients[at]
}

func (p *process) cycle(which string, tasks int, span time.Duration) (answer, error) {
	all := make([][]int64, tasks)
	began := time.Now()
	task := func(at int) error {
		acquire := p.client(0)(fmt.Sprint(which, ":", at))
		for last := time.Now(); last.Sub(began) < span; {
			release, err := acquire()
			if err != nil {
				return err
			}
			if err := release(); err != nil {
				return err
			}
			now := time.Now()
			all[at] = append(all[at], now.Sub(last).Nanoseconds())
			last = now
		}
		return nil
	}
	var err error
	if which == "main" {
		err = task(0)
	} else {
		err = together(tasks, task)
	}
	took := time.Since(began).Nanoseconds()
	latencies := slices.Concat(all...)
	slices.Sort(latencies)
	quantiles := make([]int64, 1001)
	for permille := range quantiles {
		if len(latencies) > 0 {
			quantiles[permille] = latencies[(len(latencies)-1)*permille/1000]
		}
	}
	return answer{"ops": len(latencies), "nanos": took, "q": quantiles}, err
}

func (p *process) contend(waiters int, span time.Duration) (answer, error) {
	name := fmt.Sprint("contended:", waiters)
	locks := make([]lock, waiters+1)
	for at := range locks {
		locks[at] = p.client(at + 1)(name)
	}
	began := time.Now()
	since := func() int64 { return time.Since(began).Nanoseconds() }
	var guard sync.Mutex
	next := make(chan struct{}) // closed when another one has the lock
	turns := [][4]int64{}
	err := together(len(locks), func(at int) error {
		for time.Since(began) < span {
			asked := since()
			release, err := locks[at]()
			if err != nil {
				return err
			}
			got := since()
			guard.Lock()
			close(next)
			next = make(chan struct{})
			other := next
			guard.Unlock()
			if time.Since(began) < span {
				time.Sleep(time.Duration(3000+rand.IntN(5000)) * time.Microsecond)
			}
			freed := since()
			if err := release(); err != nil {
				return err
			}
			guard.Lock()
			turns = append(turns, [4]int64{int64(at), asked, got, freed})
			guard.Unlock()
			select {
			case <-other:
			case <-time.After(span - time.Since(began)):
			}
		}
		return nil
	})
	return answer{"turns": turns}, err
}

// together runs so many goroutines and returns the first error.
func together(count int, work func(at int) error) error {
	failed := make(chan error, count)
	for at := range count {
		go func() { failed <- work(at) }()
	}
	var first error
	for range count {
		if err := <-failed; first == nil {
			first = err
		}
	}
	return first
}

func say(said answer) {
	line, err := json.Marshal(said)
	check(err)
	fmt.Println("= " + string(line))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func version(module string) string {
	info, _ := debug.ReadBuildInfo()
	for _, one := range info.Deps {
		if one.Path == module {
			return one.Version
		}
	}
	return "?"
}
