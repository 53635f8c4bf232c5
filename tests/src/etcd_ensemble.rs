//! Three etcd members that elect a leader. A test can cut them off from each other.

use std::io;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use tokio::net::TcpStream;
use tokio::sync::oneshot;

use crate::daemon;
use crate::etcd_server::{EtcdServer, Peers, START};
use crate::eventually::poll;
use crate::ports::{free_port, listen};
use crate::proxy::Proxy;

const MEMBERS: usize = 3;

/// Three members. They end when this value is dropped.
#[derive(Debug)]
pub struct EtcdEnsemble {
    members: Vec<EtcdServer>,
    bridges: Arc<Vec<Bridge>>,
    pids: Arc<Pids>,
    _switches: Vec<Switch>,
}

/// A proxy for the connections that one member opens to another.
#[derive(Debug)]
struct Bridge {
    from: usize,
    to: usize,
    proxy: Proxy,
}

/// The process ids of the members. A restart changes them.
type Pids = Mutex<[u32; MEMBERS]>;

impl EtcdEnsemble {
    /// Starts an ensemble. Returns when all three members know a leader.
    pub fn start() -> Self {
        EtcdServer::available().unwrap_or_else(|reason| panic!("{reason}"));
        daemon::started(Self::try_launch)
            .expect("free ports were taken five times before the members could bind them")
    }

    /// Starts the members once. `None` if another process has taken a port.
    ///
    /// A member has one address for all others. A switch listens there, and leads each connection
    /// over the bridge from the member that has opened it.
    fn try_launch() -> Option<Self> {
        let peers = [(); MEMBERS].map(|()| free_port());
        let bridges = (0..MEMBERS).flat_map(|to| {
            let others = (0..MEMBERS).filter(move |from| *from != to);
            let peer = peers[to];
            others.map(move |from| Bridge {
                from,
                to,
                proxy: Proxy::to(peer),
            })
        });
        let bridges: Arc<Vec<Bridge>> = Arc::new(bridges.collect());
        let pids = Arc::new(Pids::default());
        let listeners = [(); MEMBERS].map(|()| listen());
        let addresses: Vec<u16> = (listeners.iter())
            .map(|listener| listener.local_addr().unwrap().port())
            .collect();
        let cluster: Vec<String> = (addresses.iter().enumerate())
            .map(|(number, port)| format!("m{number}=http://127.0.0.1:{port}"))
            .collect();
        let members = (0..MEMBERS).map(|number| {
            let peers = Peers {
                name: format!("m{number}"),
                listens: peers[number],
                advertised: addresses[number],
                cluster: cluster.join(","),
            };
            EtcdServer::prepare(free_port(), peers)
        });
        let ensemble = Self {
            members: members.collect(),
            _switches: (listeners.into_iter().zip(peers).enumerate())
                .map(|(to, (listener, peer))| Switch::start(listener, (to, peer), &bridges, &pids))
                .collect(),
            bridges,
            pids,
        };
        ensemble.members.iter().for_each(EtcdServer::spawn);
        ensemble.note_pids();
        let complete = poll(START, || {
            if ensemble.members.iter().any(EtcdServer::has_ended) {
                return Some(false);
            }
            ensemble.is_complete().then_some(true)
        });
        match complete {
            Some(complete) => complete.then_some(ensemble),
            None => ensemble.is_not_complete(),
        }
    }

    /// All members, for a client.
    pub fn url(&self) -> String {
        let members = self.members.iter();
        let hosts: Vec<String> = members
            .map(|member| format!("127.0.0.1:{}", member.port()))
            .collect();
        format!("etcd://{}", hosts.join(","))
    }

    pub fn members(&self) -> &[EtcdServer] {
        &self.members
    }

    /// The member that leads. Waits until an election is over.
    pub fn leader(&self) -> &EtcdServer {
        let leader = || self.members.iter().find(|member| member.leads());
        poll(START, leader).expect("no leader was elected")
    }

    /// The members that do not lead.
    pub fn followers(&self) -> Vec<&EtcdServer> {
        let leader = self.leader().port();
        let others = self.members.iter();
        others.filter(|member| member.port() != leader).collect()
    }

    /// Cuts the connections between a member and the others silently: no member gets an error.
    pub fn cut_off(&self, member: &EtcdServer) {
        for bridge in self.bridges_of(member) {
            bridge.proxy.freeze();
        }
    }

    /// Resets the connections between a member and the others. New ones are reset too.
    pub fn reset(&self, member: &EtcdServer) {
        for bridge in self.bridges_of(member) {
            bridge.proxy.cut();
        }
    }

    /// Cuts a member off. The others get resets, and the member gets no error.
    pub fn cut_off_untold(&self, member: &EtcdServer) {
        let number = self.number(member);
        for bridge in self.bridges_of(member) {
            match bridge.to == number {
                true => bridge.proxy.cut_clients(),
                false => bridge.proxy.freeze(),
            }
        }
    }

    /// Starts a member again that was killed. Returns when all members know a leader.
    pub fn restart(&self, member: &EtcdServer) {
        member.spawn();
        self.note_pids();
        if poll(START, || self.is_complete().then_some(())).is_none() {
            self.is_not_complete();
        }
    }

    fn note_pids(&self) {
        let pids = self.members.iter().map(EtcdServer::pid);
        let mut noted = self.pids.lock().unwrap_or_else(PoisonError::into_inner);
        noted.iter_mut().zip(pids).for_each(|(to, pid)| *to = pid);
    }

    fn is_complete(&self) -> bool {
        self.members.iter().all(EtcdServer::is_healthy)
    }

    fn is_not_complete(&self) -> ! {
        let logs: Vec<String> = self.members.iter().map(EtcdServer::log_tail).collect();
        panic!("the ensemble is not complete\n{}", logs.join("\n---\n"));
    }

    fn bridges_of(&self, member: &EtcdServer) -> impl Iterator<Item = &Bridge> {
        let number = self.number(member);
        let touches = move |bridge: &&Bridge| bridge.from == number || bridge.to == number;
        self.bridges.iter().filter(touches)
    }

    fn number(&self, member: &EtcdServer) -> usize {
        let is_it = |other: &EtcdServer| other.port() == member.port();
        self.members.iter().position(is_it).unwrap()
    }
}

/// The address of a member for the others. It runs on its own thread.
#[derive(Debug)]
struct Switch {
    /// `None` only while the switch is dropped: dropping this ends the thread.
    ends: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Switch {
    fn start(
        listener: TcpListener,
        (to, peer): (usize, u16),
        bridges: &Arc<Vec<Bridge>>,
        pids: &Arc<Pids>,
    ) -> Self {
        let (ends, ended) = oneshot::channel();
        let (bridges, pids) = (Arc::clone(bridges), Arc::clone(pids));
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                tokio::select! {
                    _ = ended => {}
                    failed = switch(listener, (to, peer), &bridges, &pids) => failed.unwrap(),
                }
            });
        });
        Self {
            ends: Some(ends),
            thread: Some(thread),
        }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.ends = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn switch(
    listener: TcpListener,
    (to, peer): (usize, u16),
    bridges: &[Bridge],
    pids: &Pids,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let (mut client, address) = listener.accept().await?;
        // The caller may be gone. A member that is not known yet tries again.
        let Some(from) = caller(address.port(), pids) else {
            continue;
        };
        let bridge = bridges.iter().find(|b| b.from == from && b.to == to);
        // A member may call itself, and nothing is to cut it off from itself.
        let port = bridge.map_or(peer, |bridge| bridge.proxy.port());
        tokio::spawn(async move {
            let mut bridge = TcpStream::connect(("127.0.0.1", port)).await?;
            client.set_nodelay(true)?;
            bridge.set_nodelay(true)?;
            tokio::io::copy_bidirectional(&mut client, &mut bridge).await
        });
    }
}

/// Which member has opened the connection with this local port, as the kernel knows.
fn caller(port: u16, pids: &Pids) -> Option<usize> {
    let sockets = std::fs::read_to_string("/proc/net/tcp").ok()?;
    // 127.0.0.1 in the order of bytes that the kernel uses.
    let local = format!("0100007F:{port:04X}");
    let inode = sockets.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        // 01 stands for an established connection.
        let is_it = fields.get(1) == Some(&&*local) && fields.get(3) == Some(&"01");
        is_it.then(|| fields.get(9).copied()).flatten()
    })?;
    let socket = format!("socket:[{inode}]");
    let pids = *pids.lock().unwrap_or_else(PoisonError::into_inner);
    pids.iter().position(|pid| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd"));
        let mut open = open.into_iter().flatten().flatten();
        open.any(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.as_os_str() == &*socket))
    })
}
