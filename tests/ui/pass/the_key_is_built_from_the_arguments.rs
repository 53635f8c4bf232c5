use lockcore::{Error, distributed_lock};

struct Order {
    id: u64,
    lines: Vec<(u32, &'static str)>,
    region: String,
}

impl Order {
    const KIND: &'static str = "order";

    fn region(&self) -> &str {
        &self.region
    }

    #[distributed_lock(key = self.region, held = lock)]
    async fn field(&mut self) -> Result<String, Error> {
        self.region.clear();
        Ok(lock.name().to_owned())
    }

    #[distributed_lock(key = "{Self::KIND}:{self.id:04}", held = lock)]
    async fn path(&self) -> Result<String, Error> {
        Ok(lock.name().to_owned())
    }
}

const PREFIX: &str = "shop";

fn key_of(order: &Order) -> String {
    format!("made:{}", order.id)
}

#[distributed_lock(key = "nightly", held = lock)]
async fn constant() -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = "{{{id}}}:{id:04}:{name:?}:{name:>width$}", held = lock)]
async fn plain(id: u64, name: &str, width: usize) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = "{id:x }:{id:?\t}:{id:04 }", held = lock)]
async fn space_behind_a_spec(id: u64) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = "{PREFIX}:{r}:{type}", held = lock)]
async fn constants_and_raw_names(r: u8, r#type: u8) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = r"{order.id}:{order.region():?}:{order.lines[0].1}:{order.lines.len()}:{id}", held = lock)]
async fn fields_and_calls(order: &Order, id: u64) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = "{key_of(&order)}", held = lock)]
async fn the_body_may_consume(order: Order) -> Result<String, Error> {
    drop(order);
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = key_of(order), held = lock)]
async fn expression(order: &Order) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = name, held = lock)]
async fn str_expression(name: &str) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

/// The body can use the variable that names the lock.
#[distributed_lock(key = name, held = lock)]
async fn string_expression(mut name: String) -> Result<[String; 2], Error> {
    name.push('!');
    Ok([lock.name().to_owned(), name])
}

#[distributed_lock(keys = names, held = locks)]
async fn strings_expression(names: Vec<String>) -> Result<(usize, Vec<String>), Error> {
    Ok((locks.iter().count(), names))
}

/// A type that turns into a `String` and cannot be cloned.
struct Name(&'static str);

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0.to_owned()
    }
}

#[distributed_lock(key = name, held = lock)]
async fn not_cloned(name: Name) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = order.name, held = lock)]
async fn field_not_cloned(order: Named) -> Result<String, Error> {
    Ok(format!("{}:{}", lock.name(), order.id))
}

struct Named {
    id: u64,
    name: Name,
}

#[distributed_lock(key = name, held = lock)]
async fn anything(name: impl Into<String>) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = name, held = lock)]
async fn generic<K: Into<String>>(name: K) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

/// The body can use a value that is `Clone`, even if its type is a type parameter.
#[distributed_lock(key = name, held = lock)]
async fn generic_and_cloned<K: Into<String> + Clone>(name: K) -> Result<[String; 2], Error> {
    Ok([lock.name().to_owned(), name.into()])
}

#[distributed_lock(key = name, held = lock)]
async fn mutable_text(name: &mut str) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(keys = names, held = locks)]
async fn any_names(names: impl IntoIterator<Item = String>) -> Result<usize, Error> {
    Ok(locks.iter().count())
}

#[distributed_lock(key = name.ok_or_else(|| std::io::Error::other("no name"))?, held = lock)]
async fn fallible_expression(name: Option<&str>) -> Result<String, Box<dyn std::error::Error>> {
    Ok(lock.name().to_owned())
}

macro_rules! locked {
    ($name:ident, $key:expr) => {
        #[distributed_lock(key = $key, held = lock)]
        async fn $name() -> Result<String, Error> {
            Ok(lock.name().to_owned())
        }
    };
}
locked!(in_a_macro, "a{{b");

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let order = || Order {
        id: 7,
        lines: vec![(1, "tea")],
        region: "eu".to_owned(),
    };

    assert_eq!(constant().await?, "nightly");
    assert_eq!(plain(7, "x", 3).await?, "{7}:0007:\"x\":  x");
    assert_eq!(space_behind_a_spec(15).await?, "f:15:0015");
    assert_eq!(constants_and_raw_names(1, 2).await?, "shop:1:2");
    assert_eq!(fields_and_calls(&order(), 9).await?, "7:\"eu\":tea:1:9");
    assert_eq!(order().path().await?, "order:0007");
    assert_eq!(the_body_may_consume(order()).await?, "made:7");
    assert_eq!(expression(&order()).await?, "made:7");
    assert_eq!(order().field().await?, "eu");
    let owned = |names: [&str; 2]| names.map(str::to_owned);
    assert_eq!(string_expression("a".to_owned()).await?, owned(["a", "a!"]));
    let names = Vec::from(owned(["a", "b"]));
    assert_eq!(strings_expression(names.clone()).await?, (2, names.clone()));
    assert_eq!(not_cloned(Name("a")).await?, "a");
    let order_with_name = Named {
        id: 7,
        name: Name("a"),
    };
    assert_eq!(field_not_cloned(order_with_name).await?, "a:7");
    assert_eq!(anything("a").await?, "a");
    assert_eq!(generic("a").await?, "a");
    assert_eq!(generic_and_cloned("a").await?, owned(["a", "a"]));
    assert_eq!(mutable_text(&mut "a".to_owned()).await?, "a");
    assert_eq!(any_names(names).await?, 2);
    assert_eq!(str_expression("a b").await?, "a b");
    assert_eq!(fallible_expression(Some("there")).await.unwrap(), "there");
    assert_eq!(
        fallible_expression(None).await.unwrap_err().to_string(),
        "no name"
    );
    assert_eq!(in_a_macro().await?, "a{b");
    Ok(())
}
