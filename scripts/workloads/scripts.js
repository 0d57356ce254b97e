// Needs: node

const fs = require('fs'), os = require('os'), net = require('net'), {Worker} = require('worker_threads'), {spawnSync} = require('child_process');
fs.writeFileSync('x', 'y'); fs.copyFileSync('x', 'z'); fs.watch('.').close(); spawnSync('sh', ['-c', 'echo hi']);
new Worker('require("crypto").pbkdf2Sync("a", "b", 1000, 32, "sha512")', {eval: true}).on('exit', () => {
  const server = net.createServer(s => s.end('hi')).listen(0, '127.0.0.1', () =>
    net.connect(server.address().port, '127.0.0.1').on('data', () => { console.log('fine'); server.close() })) });
