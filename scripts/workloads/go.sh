# Needs: go

export HOME=$PWD GOFLAGS=-mod=mod GO111MODULE=off; cat > m.go <<'END'
package main
import ("fmt"; "net"; "os"; "os/exec"; "io"; "sync")
func main() { l, _ := net.Listen("tcp", "127.0.0.1:0"); go func() { c, _ := l.Accept(); io.WriteString(c, "hi"); c.Close() }()
  c, _ := net.Dial("tcp", l.Addr().String()); b, _ := io.ReadAll(c); exec.Command("true").Run(); os.WriteFile("x", b, 0600)
  var w sync.WaitGroup; for i := 0; i < 8; i++ { w.Add(1); go func() { w.Done() }() }; w.Wait(); fmt.Println("fine") }
END
go run m.go
